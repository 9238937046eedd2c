"""Sample from a vLLM engine inside the trainer's process, which receives new weights after every step.

Every rank has its own engine, or tensor_parallel consecutive ranks share one; vLLM's external launcher builds
the engine under torchrun's environment. generate() drives the engine by add_request() and step(), so that a
completion can be scored as soon as it ends. This file contains no rewards and no algorithm: token ids go in,
and token ids with their log-probabilities and experts come out.

Coverage (each parameter received data) is checked at every sync; checksum (the engine holds the sent bits,
check_weights()) and parity (equal log-probabilities, runtime/checks.py) at the first and every check_every
steps.

Reading order: RolloutEngine (generate, sync, check_weights), the turns of a rollout, options and checks of an
engine, routed experts, environment variables. memory_plan.py estimates the engine's memory, fp8.py rounds its
weights, and vllm_worker.py contains the code that runs inside vLLM's worker.
"""

import dataclasses
import gc
import json
import logging
import math
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from batch import UNFINISHED, Completion, Request
from fp8 import FP8_QUANTIZATION, check_fp8, quantise_for_engine
from memory_plan import CPU_BLOCK_SIZE, block_size_of, check_kv_cache, kv_bytes_per_token, memory_share
from moe_model import engine_dtype, is_moe_layer, num_experts_of
from runtime.machine import device_of_rank, fp8_toolkit
from runtime.memory import GIB, fixed_segments
from runtime.schedule import CacheRoom, WaitingLine
from settings import RolloutSettings
from vllm_worker import (
    compare_weights_in_worker,
    draw_seeded_tokens,
    kernels_in_worker,
    load_weights_in_worker,
    switch_capture_in_worker,
)


# ------------------------------------------------------------------------------------------------------------
# The engine
# ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SyncReport:
    """Size of one weight sync."""

    num_tensors: int
    num_bytes: int
    is_checked: bool  # the engine's weights were compared with the policy's


class RolloutEngine:
    """A vLLM engine that samples with the policy's weights.

    model_path: folder of a Hugging Face checkpoint; the engine reads only the configuration and the tokenizer
        and starts with random weights, so the first sync() has to pass the same checks as every later sync.
    max_model_len: longest prompt + completion in tokens, which the KV cache is planned for.
    settings: the section `rollout`. The ranks of a shared engine (tensor_parallel) call generate() and sync()
        together. With expert_parallel, sync() receives the experts of the local rank.
    trainer_bytes: GPU memory that the trainer will take (runtime.memory.trainer_bytes). The engine takes the
        remaining memory, unless rollout.kv_cache_gib sets the size of the KV cache.
    timeout_s: time limit of collectives among the ranks of the engine; None: torch's default.
    more_options: arguments of vllm.LLM besides those of engine_options(), for example {"max_logprobs": 128}.

    With rollout.sleep_level the engine starts asleep, so that the trainer can be built in the free memory.
    Raises ValueError for settings that this machine or this version of vLLM does not support.
    """

    def __init__(
        self,
        model_path: str | Path,
        max_model_len: int,
        settings: RolloutSettings,
        trainer_bytes: int = 0,
        timeout_s: float | None = None,
        more_options: dict | None = None,
    ):
        self.on_gpu = torch.cuda.is_available()
        check_hardware(settings)
        set_vllm_environment(self.on_gpu, settings.fp8 == "on")
        from transformers import AutoConfig

        settings = settings.model_copy(update={"dtype": engine_dtype(settings, self.on_gpu)})
        self.settings = settings
        self.max_model_len = max_model_len
        self.hf_config = AutoConfig.from_pretrained(
            model_path, local_files_only=True, trust_remote_code=False
        )
        self.num_experts = num_experts_of(self.hf_config)
        self.captures_routes = settings.capture_routes != "off" and self.num_experts > 0
        check_fp8(settings, self.hf_config, device_of_rank())
        if settings.fp8 == "on":
            refuse_scales_of_two()
        options = engine_options(model_path, max_model_len, settings, self.captures_routes, timeout_s)
        options |= more_options or {}
        check_kv_cache(self.hf_config, settings, max_model_len, block_size_of(options))
        if self.on_gpu and settings.kv_cache_gib is None:
            free, total = torch.cuda.mem_get_info()
            options["gpu_memory_utilization"] = memory_share(
                self.hf_config, settings, max_model_len, trainer_bytes, free, total
            )
        with fixed_segments():
            self.llm = start_vllm(options, self.captures_routes)
        if self.num_experts and self.on_gpu and not settings.enforce_eager:
            GRAPHS_OF_EXPERTS.add(self)
        if settings.tensor_parallel > 1 and not self.on_gpu:  # vLLM leaves segments that break the next run
            for segment in Path("/dev/shm").glob("*-tp:*-cpushm_*"):
                segment.unlink(missing_ok=True)
        self.engine = self.llm.llm_engine
        self.stop_ids, self.stop_texts = stops_of(model_path, self.llm.get_tokenizer(), settings.stop)
        self.seconds_per_step = float("inf")  # mean of the last rollout
        self.tokens_per_second = 0.0  # mean of the last rollout, over all sequences
        self.policy_version: int | None = None  # finished steps at the last sync; None: unknown
        # tokens and number of the last rollout's completions; a turn of an episode counts as a completion
        self.previous_rollout = (0, 0)
        self.is_capturing = self.captures_routes
        self.sleep()

    def describe(self) -> str:
        """Describe the capacity and the kernels of the engine in one line."""
        block_size = self.engine.vllm_config.cache_config.block_size
        num_tokens = self.num_blocks * block_size
        num_completions = self.num_blocks // math.ceil(self.max_model_len / block_size)
        gib = num_tokens * kv_bytes_per_token(self.hf_config, self.settings) / GIB
        (kernels,) = self.llm.collective_rpc(kernels_in_worker)
        return (
            f"engine: a KV cache of {gib:.3g} GiB holds {num_tokens:,} tokens, that is {num_completions:,} "
            f"completions of full length ({self.max_model_len:,} tokens with the prompt; at most "
            f"{self.settings.sequences_at_once} run at once); {kernels}"
        )

    @property
    def num_blocks(self) -> int:
        """Return the number of KV cache blocks for requests; vLLM reserves one more for itself."""
        return self.engine.vllm_config.cache_config.num_gpu_blocks - 1

    def generate(
        self,
        requests: list[Request],
        policy_version: int,
        on_finished: Callable[[int, Completion], None] = lambda index, completion: None,
        on_step: Callable[[], object] = lambda: None,
        capture_routes: bool = True,
        episodes: "Turns | None" = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> list[Completion]:
        """Sample all requests in the order of a WaitingLine; return a completion for each request.

        on_finished(index, completion): called when a completion ends. on_step(): called after each step of
        the engine. capture_routes: return routed experts, if the engine can. episodes: decides what follows a
        turn of the requests; None: every request is an episode of one turn. is_over(): asked after each step,
        ends the rollout; completions then may be UNFINISHED, and have no routes. Only with an engine per rank
        and without episodes.

        The ranks of a shared engine pass different requests, with group numbers that are unique among the
        ranks, and each rank receives the completions of its requests. vLLM runs a scheduler on every rank,
        so that every rank has to add the requests of all ranks in the same order.

        Raises RuntimeError if the engine does not hold the weights of policy_version.
        """
        if policy_version != self.policy_version:
            raise RuntimeError(
                f"the engine holds the weights after step {self.policy_version}, the policy is at "
                f"{policy_version}: a weight sync was skipped"
            )
        engine_requests, first = self.gather_requests(requests)
        local = range(first, first + len(requests))
        self.switch_capture(self.captures_routes and capture_routes)
        turns = OneTurn(engine_requests, local) if episodes is None else episodes
        if episodes is not None and self.settings.tensor_parallel > 1:
            turns = SharedTurns(episodes, local, self.tensor_parallel_group())
        engine_requests = [request.after_prefix() for request in engine_requests]
        completions, captured = self.run_requests(
            engine_requests, local, turns, on_finished, on_step, is_over
        )
        if not self.is_capturing:
            return completions
        ended = [i for i, completion in enumerate(completions) if completion.finish_reason != UNFINISHED]
        num_rows = [len(requests[i].prompt_ids) + len(completions[i].token_ids) - 1 for i in ended]
        routes = validate_routes([captured[i] for i in ended], num_rows, self.hf_config)
        for i, ids in zip(ended, routes):
            completions[i] = dataclasses.replace(completions[i], routed_experts=ids)
        return completions

    def gather_requests(self, requests: list[Request]) -> tuple[list[Request], int]:
        """Return the requests of all ranks of this engine, and the index of this rank's first request."""
        if self.settings.tensor_parallel == 1:
            return requests, 0
        gathered = [None] * self.settings.tensor_parallel
        group = self.tensor_parallel_group()
        dist.all_gather_object(gathered, requests, group=group)
        first = sum(len(requests_of_rank) for requests_of_rank in gathered[: dist.get_rank(group)])
        return sum(gathered, []), first

    def run_requests(
        self,
        requests: list[Request],
        local: range,
        turns: "Turns",
        on_finished: Callable,
        on_step: Callable,
        is_over: Callable[[], bool],
    ) -> tuple[list[Completion], list[np.ndarray | None]]:
        """Run requests to the end: fill the engine, and start the next request as soon as one has ended.

        local: the indices of this rank's requests. Returns the completion and the captured routes of each of
        this rank's requests. vLLM returns the output of all requests on every rank of a shared engine.

        Each turn of an episode is a request of its own. While tools run, an episode takes no slot of the
        engine: waiting requests start. An episode that returns comes before them.
        """
        start = time.perf_counter()
        num_steps = 0
        block_size = self.engine.vllm_config.cache_config.block_size
        line = TurnLine(requests, self.settings, self.num_blocks, block_size, self.previous_rollout)
        completions: list[Completion | None] = [None] * len(local)
        while line.is_busy:
            for turn_id, request in line.starting():
                params = sampling_params(request, self.stop_ids, self.stop_texts)
                self.engine.add_request(turn_id, {"prompt_token_ids": request.prompt_ids}, params)
            num_steps += bool(line.running)
            outputs = self.step() if line.running else []
            for output in outputs:
                sample = output.outputs[0]
                index = line.end_turn(output.request_id, len(sample.token_ids))
                turn = completion_of(sample, time.perf_counter() - start, requests[index].topk)
                turns.end_turn(index, turn, sample.routed_experts if self.is_capturing else None)
            wait_s = 0.0 if line.has_work else EVENT_WAIT_S
            events = turns.poll(wait_s) if line.between_turns else []
            for index, event in events:
                line.take_event(index, event)
                if isinstance(event, Completion) and index in local:
                    completions[index - local.start] = completion = event.with_version(self.policy_version)
                    on_finished(index - local.start, completion)
            line.room.take_step()
            on_step()
            if line.is_busy and is_over():
                for index, turn in self.stop_requests(line, time.perf_counter() - start).items():
                    turns.end_turn(index, turn, None)
                for index, completion in turns.poll(0.0):
                    completions[index] = completion.with_version(self.policy_version)
                break
        if num_steps:
            seconds = time.perf_counter() - start
            self.seconds_per_step = seconds / num_steps
            self.tokens_per_second = line.room.tokens / seconds
            self.previous_rollout = (line.room.tokens, line.room.ended)
        return completions, [turns.routes_of(index) for index in local]

    def stop_requests(self, line: "TurnLine", seconds: float) -> dict[int, Completion]:
        """Abort all requests that have not ended; return the tokens of each that it has sampled so far."""
        from vllm.v1.engine import FinishReason

        processor = self.engine.output_processor
        empty = Completion([], [], UNFINISHED, seconds)
        turns = dict.fromkeys([*line.running.values(), *line.waiting.waiting, *line.returning], empty)
        for turn_id, index in line.running.items():
            (internal_id,) = processor.external_req_ids[turn_id]
            state = processor.request_states[internal_id]
            sample = state.make_request_output([], None, FinishReason.ABORT, None).outputs[0]
            if sample.token_ids:
                turn = completion_of(sample, seconds, topk=0)
                turns[index] = dataclasses.replace(turn, finish_reason=UNFINISHED)
        self.engine.abort_request([*line.running])
        return turns

    def switch_capture(self, on: bool) -> None:
        """Start or stop the capture of routed experts, for the next requests; none may be running.

        Without capture, an engine that could capture does no work for routes on the host. vLLM stores the
        routes of a token beside its KV cache block, so prefixes that were cached during an interval without
        capture have no routes and are dropped.
        """
        if not self.captures_routes:
            return
        scheduler = self.engine.engine_core.engine_core.scheduler
        scheduler._re_block_ids.clear()  # vLLM keeps entries of requests that ended during the last step
        if on == self.is_capturing:
            return
        self.is_capturing = scheduler.enable_return_routed_experts = on
        self.llm.collective_rpc(switch_capture_in_worker, args=(on,))
        if on and not self.llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset; its prefixes have no captured routes")

    def step(self) -> list:
        """Take one step of vLLM and return the finished requests; RuntimeError if vLLM raises any error."""
        try:
            return self.engine.step()
        except Exception as error:
            self.policy_version = None  # the engine's state is unknown
            raise RuntimeError(
                f"the engine failed while sampling: {type(error).__name__}: {error}. The checkpoints are "
                "complete: repeat the same command to resume from the newest one"
            ) from error

    def tensor_parallel_group(self):
        """Return the process group of the ranks that share this engine."""
        from vllm.distributed.parallel_state import get_tp_group

        return get_tp_group().cpu_group

    def sync(
        self,
        named_tensors: Iterable[tuple[str, Tensor]],
        policy_version: int,
        check_against: Iterable[tuple[str, Tensor]] | None = None,
    ) -> SyncReport:
        """Replace all weights by named_tensors (Hugging Face names, fused experts); drop cached prefixes.

        check_against: the same tensors once more, for check_weights(). The KV cache wakes up after the check,
        because the check needs its memory to gather experts. Raises RuntimeError that names the parameters
        that received no data, or the tensor that vLLM refused; the engine then refuses to sample.
        """
        self.policy_version = None
        counter = TensorCounter(self.num_experts)
        self.wake_up("weights")
        try:
            tensors = quantise_for_engine(
                counter.count(named_tensors), self.settings.fp8, self.settings.simulate_format
            )
            (missing,) = self.llm.collective_rpc(load_weights_in_worker, args=(tensors, not self.on_gpu))
        except Exception as error:  # vLLM's loaders raise many types, for example AssertionError
            raise RuntimeError(
                f"weight sync: the engine refused {counter.last_name}: {error or type(error).__name__}"
            ) from error
        if missing:
            only_experts = {name.rpartition(".")[2] for name in missing} == {"w13_weight", "w2_weight"}
            advice = "; this vLLM does not take fused experts, see requirements.txt" if only_experts else ""
            raise RuntimeError(
                f"weight sync: {len(missing)} parameters of the engine were not covered, first: "
                f"{', '.join(missing[:3])}{advice}"
            )
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(
                "weight sync: the prefix cache could not be reset (requests still run), and would "
                "mix tokens of the old and the new policy"
            )
        if check_against is not None:
            self.check_weights(check_against)
        self.wake_up("kv_cache")
        self.policy_version = policy_version
        return SyncReport(counter.num_tensors, counter.num_bytes, check_against is not None)

    def check_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Compare the engine's weights with named_tensors, by checksum in the engine's dtype.

        The engine's weights must be awake. RuntimeError names the parameters that differ. Parameters that
        vLLM quantises to FP8 or splits over ranks are skipped; for these, parity is the only proof.
        """
        tensors = quantise_for_engine(named_tensors, self.settings.fp8, self.settings.simulate_format)
        (differing,) = self.llm.collective_rpc(compare_weights_in_worker, args=(tensors,))
        if differing:
            self.policy_version = None
            raise RuntimeError(
                f"weight sync: the engine holds other values than the policy's in {len(differing)} "
                f"parameters, first: {', '.join(differing[:3])}"
            )

    def wake_up(self, tag: str) -> None:
        """Allocate the GPU memory of "weights" or "kv_cache" again; no effect at sleep_level 0."""
        if not self.settings.sleep_level:
            return
        try:
            self.llm.wake_up(tags=[tag])
        except Exception as error:
            raise RuntimeError(
                f"the engine could not take back the memory of its {tag}: {error}. The trainer uses "
                "more memory than planned: set rollout.kv_cache_gib to less than the size of the KV cache in "
                "the line `engine:` of the log"
            ) from error

    def sleep(self) -> None:
        """Free the GPU memory for the update until the next sync(); no effect at sleep_level 0."""
        if self.settings.sleep_level:
            self.policy_version = None
            self.llm.sleep(level=self.settings.sleep_level)


Event = tuple[int, Request | Completion]  # index of a request, and the next turn or the end of its episode
EVENT_WAIT_S = 0.05  # wait of an idle engine for the next turn, while tools run


class Turns(Protocol):
    """Interface of the episodes of a rollout, by index of the request (episodes.Episodes)."""

    def end_turn(self, index: int, turn: Completion, routes: np.ndarray | None) -> None:
        """Take a turn of the policy."""

    def poll(self, wait_s: float) -> list[Event]:
        """Return the next turns and the ended episodes since the last call; wait for the first."""

    def routes_of(self, index: int) -> np.ndarray | None:
        """Return the routes of an ended episode."""


class OneTurn:
    """Episodes of one turn, of all ranks of an engine: the prefix of a request and the sampled tokens.

    requests: of all ranks; local: the indices of this rank's requests. Routes of other ranks are dropped at
    once, because routes are large, for example 384 bytes per token in a model of 48 layers with 8 experts per
    token.
    """

    def __init__(self, requests: list[Request], local: range):
        self.requests = requests
        self.local = local
        self.events: list[Event] = []
        self.routes: dict[int, np.ndarray | None] = {}

    def end_turn(self, index: int, turn: Completion, routes: np.ndarray | None) -> None:
        """End the episode."""
        prefix = self.requests[index].prefix
        if prefix is not None:
            turn = turn.after(prefix)
            if prefix.finish_reason is not None and routes is not None:
                routes = routes[:-1]  # without the token that is dropped
        self.events.append((index, turn))
        if index in self.local:
            self.routes[index] = routes

    def poll(self, wait_s: float) -> list[Event]:
        """Return the episodes that ended since the last call."""
        events = self.events
        self.events = []
        return events

    def routes_of(self, index: int) -> np.ndarray | None:
        """Return the routes of an ended episode of this rank."""
        return self.routes[index]


class SharedTurns:
    """The episodes of all ranks of an engine; each rank plays its own, and all receive the same events.

    So all ranks add the same requests in the same order. local: the indices of this rank's requests.
    """

    def __init__(self, episodes: Turns, local: range, group):
        self.episodes = episodes
        self.local = local
        self.group = group

    def end_turn(self, index: int, turn: Completion, routes: np.ndarray | None) -> None:
        """Take a turn of the policy; turns of other ranks are dropped."""
        if index in self.local:
            self.episodes.end_turn(index - self.local.start, turn, routes)

    def poll(self, wait_s: float) -> list[Event]:
        """Return the events of all ranks, which call this at the same iterations."""
        events = [(self.local[row], event) for row, event in self.episodes.poll(wait_s)]
        gathered: list = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(gathered, events, group=self.group)
        return sum(gathered, [])

    def routes_of(self, index: int) -> np.ndarray | None:
        """Return the routes of an ended episode of this rank."""
        return self.episodes.routes_of(index - self.local.start)


class TurnLine:
    """The requests of a rollout: waiting, running, and between two turns. Arguments: see CacheRoom."""

    def __init__(
        self, requests: list[Request], settings: RolloutSettings, num_blocks: int, block_size: int,
        previous: tuple[int, int],
    ):  # fmt: skip
        self.requests = list(requests)  # the next turn of an episode replaces its entry
        self.max_num_seqs = settings.sequences_at_once
        self.waiting = WaitingLine(self.requests, self.max_num_seqs)
        self.room = CacheRoom(self.requests, num_blocks, block_size, settings.prefix_caching, previous)
        self.num_turns = 0  # started turns of all requests
        self.running: dict[str, int] = {}  # {id of a turn in the engine: request}
        self.between_turns: set[int] = (
            set()
        )  # requests that wait for an event, and take no slot of the engine
        self.returning: deque[int] = deque()  # requests whose next turn can start

    @property
    def has_work(self) -> bool:
        """Tell whether the engine can compute something now."""
        return bool(self.waiting or self.running or self.returning)

    @property
    def is_busy(self) -> bool:
        """Tell whether a request has not ended."""
        return self.has_work or bool(self.between_turns)

    def starting(self) -> Iterator[tuple[str, Request]]:
        """Yield an id and the request of each turn that fits into the engine, and count it as running."""
        while len(self.running) < self.max_num_seqs and (self.returning or self.waiting):
            index = self.returning[0] if self.returning else self.waiting.peek()
            if not self.room.has_room_for(index):
                return
            if self.returning:
                self.returning.popleft()
            else:
                self.waiting.pop()
            self.room.start(index)
            self.num_turns += 1
            turn_id = str(self.num_turns)
            self.running[turn_id] = index
            yield turn_id, self.requests[index]

    def end_turn(self, turn_id: str, num_tokens: int) -> int:
        """Record the end of a running turn; return the index of the request."""
        index = self.running.pop(turn_id)
        self.room.end(index, num_tokens)
        self.between_turns.add(index)
        return index

    def take_event(self, index: int, event: Request | Completion) -> None:
        """Queue the next turn of an episode, ahead of the waiting requests, or record the end."""
        self.between_turns.remove(index)
        if isinstance(event, Request):
            self.requests[index] = event
            self.returning.append(index)
        else:
            self.waiting.record_length(index, len(event.token_ids))


def completion_of(sample, seconds: float, topk: int) -> Completion:
    """Return vLLM's output of one request with `topk` further tokens; seconds: since the rollout's start."""
    topk_ids, topk_logprobs = topk_of(sample.logprobs, topk) if topk else (None, None)
    return Completion(
        token_ids=[*sample.token_ids],
        logprobs=[*sample.logprobs.logprobs[:: 1 + topk]],
        finish_reason=sample.finish_reason,
        seconds=seconds,
        topk_ids=topk_ids,
        topk_logprobs=topk_logprobs,
    )


class TensorCounter:
    """Counts the tensors of a sync and remembers the last name, for SyncReport and error messages."""

    def __init__(self, num_experts: int):
        self.num_experts = num_experts
        self.num_tensors = 0
        self.num_bytes = 0
        self.last_name: str | None = None

    def count(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors; ValueError if a fused tensor has some of the experts, not all.

        vLLM would accept the tensor and fill only the first experts.
        """
        for name, tensor in named_tensors:
            self.last_name = name
            if tensor.dim() == 3 and len(tensor) != self.num_experts:
                raise ValueError(f"{name} holds {len(tensor)} experts, the model has {self.num_experts}")
            self.num_tensors += 1
            self.num_bytes += tensor.numel() * tensor.element_size()
            yield name, tensor


# ------------------------------------------------------------------------------------------------------------
# Options and checks of an engine
# ------------------------------------------------------------------------------------------------------------
# Largest batches of a CUDA graph, by vLLM's default on Hopper and on Blackwell; larger ones run without.
GRAPH_SIZES = (512, 1024)


def engine_options(
    model_path: str | Path,
    max_model_len: int,
    settings: RolloutSettings,
    captures_routes: bool,
    timeout_s: float | None = None,
) -> dict:
    """Translate the section `rollout` into keyword arguments of vllm.LLM.

    captures_routes: False for a dense model, whatever rollout.capture_routes says.
    """
    on_gpu = torch.cuda.is_available()
    options = {
        "model": str(model_path),
        "load_format": "dummy",
        "dtype": settings.dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": settings.sequences_at_once,
        "enable_prefix_caching": settings.prefix_caching,
        "logprobs_mode": "processed_logprobs",  # after temperature, as in the trainer
        "generation_config": "vllm",  # a checkpoint's own top_k or top_p would skew importance ratios
        "seed": 0,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "enforce_eager": not on_gpu or settings.enforce_eager,
        "enable_sleep_mode": bool(settings.sleep_level),
        "tensor_parallel_size": settings.tensor_parallel,
        "enable_expert_parallel": settings.expert_parallel,
    }
    if not on_gpu:
        # For a prompt in chunks, vLLM rewinds the random generator of the request, and CPU generators cannot
        # be rewound. Without chunks, a prompt that exceeds the step's budget waits for the next step.
        options["enable_chunked_prefill"] = False
        options["block_size"] = CPU_BLOCK_SIZE
    elif settings.dtype == "bfloat16":  # like the trainer's logits; in bfloat16, steps of 1/8
        options["hf_overrides"] = {"head_dtype": "float32"}
    if on_gpu and settings.sequences_at_once > GRAPH_SIZES[0] and not settings.enforce_eager:
        size = math.ceil(settings.sequences_at_once / 16) * 16  # vLLM captures multiples of 16
        options["max_cudagraph_capture_size"] = min(size, GRAPH_SIZES[1])
    if on_gpu and captures_routes:
        options["block_size"] = 64  # larger blocks: with capture, each step lists all blocks in use
    if timeout_s is not None:
        options["distributed_timeout_seconds"] = math.ceil(timeout_s)
        options["cpu_distributed_timeout_seconds"] = math.ceil(timeout_s)
    if settings.kv_cache_gib is not None:
        options["kv_cache_memory_bytes"] = int(settings.kv_cache_gib * GIB)
        options["gpu_memory_utilization"] = 0.05  # vLLM only checks that this share of the GPU is free
    if "RANK" in os.environ:
        options["distributed_executor_backend"] = "external_launcher"
    if settings.fp8 == "on":
        options |= {"quantization": "fp8_per_block", "quantization_config": FP8_QUANTIZATION}
    if settings.kv_cache_fp8:
        options["kv_cache_dtype"] = "fp8"
    return options


def stops_of(
    model_path: str | Path, tokenizer, more: Sequence[int | str] = ()
) -> tuple[list[int], list[str]]:
    """Return the token ids and the texts that end a completion.

    The ids are the end-of-sequence ids of the tokenizer, of config.json and of generation_config.json (the
    only file that lists the second id of Qwen models), and the ids in `more`, that is rollout.stop. The texts
    are the texts in `more`. A text that equals an added token, for example "<|im_end|>", becomes the token's
    id, because decoded text may omit added tokens. ValueError for an id outside of the vocabulary.
    """
    ids = [tokenizer.eos_token_id]
    texts = []
    vocab_size = len(tokenizer)
    for name in ("config.json", "generation_config.json"):
        file = Path(model_path) / name
        values = json.loads(file.read_text()) if file.is_file() else {}
        vocab_size = values.get("vocab_size") or vocab_size  # of the weights; config.json comes first
        eos_ids = values.get("eos_token_id")
        eos_ids = [i for i in (eos_ids if isinstance(eos_ids, list) else [eos_ids]) if i is not None]
        if outside := [i for i in eos_ids if type(i) is not int or not 0 <= i < vocab_size]:
            raise ValueError(
                f"model.path: eos_token_id {outside[0]!r} in {file} is no token id, the vocabulary has "
                f"{vocab_size}; correct the file"
            )
        ids += eos_ids
    added_tokens = tokenizer.get_added_vocab()
    for stop in more:
        if isinstance(stop, int) and not 0 <= stop < len(tokenizer):
            raise ValueError(f"rollout.stop: {stop} is no token id, the vocabulary has {len(tokenizer)}")
        if isinstance(stop, int) or stop in added_tokens:
            ids.append(added_tokens.get(stop, stop))
        else:
            texts.append(stop)
    return list(dict.fromkeys(i for i in ids if i is not None)), texts


def sampling_params(request: Request, stop_ids: list[int], stop_texts: list[str]):
    """Translate a request into vLLM's SamplingParams; vLLM returns the output when the request has ended."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=request.temperature,
        seed=request.seed if request.temperature > 0 else None,
        max_tokens=request.max_new_tokens,
        min_tokens=request.min_new_tokens,
        logprobs=request.topk,  # in addition to the sampled token, which comes first
        flat_logprobs=True,
        stop_token_ids=stop_ids,
        stop=stop_texts,
        include_stop_str_in_output=bool(stop_texts),
        detokenize=bool(stop_texts),  # reward workers turn tokens into text
        skip_special_tokens=not stop_texts,  # a stop text may contain some
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # the object is not shared by requests
    )


def topk_of(flat_logprobs, topk: int) -> tuple[Tensor, Tensor]:
    """Return ids [T, k] int32 and log-probabilities [T, k] float32 of the engine's most likely tokens.

    flat_logprobs: vLLM's FlatLogprobs of a completion, with the sampled token and k tokens per position.
    RuntimeError if the engine samples from a part of the vocabulary only (top-k or top-p sampling): the
    probabilities that remain are rescaled, and the trainer computes the whole distribution.
    """
    ids = torch.tensor(flat_logprobs.token_ids, dtype=torch.int32).view(-1, 1 + topk)[:, 1:]
    logprobs = torch.tensor(flat_logprobs.logprobs, dtype=torch.float32).view(-1, 1 + topk)[:, 1:]
    if logprobs.isneginf().any():
        raise RuntimeError(
            "Request.topk: the engine gives a probability of 0 to some of its most likely tokens, as top-k "
            "and top-p sampling do: their log-probabilities need samples of the whole vocabulary"
        )
    return ids.contiguous(), logprobs.contiguous()


def check_hardware(settings: RolloutSettings) -> None:
    """Raise ValueError for settings that this machine does not support."""
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        check_driver()
    if settings.sleep_level and not on_gpu:
        raise ValueError("rollout.sleep_level needs a GPU: set it to 0")
    if settings.expert_parallel and not on_gpu:
        raise ValueError(
            "rollout.expert_parallel needs a GPU (vLLM's CPU kernel has to hold all experts): set it to false"
        )
    device = device_of_rank()
    if settings.kv_cache_fp8 and device.capability < (8, 9):
        raise ValueError(
            "rollout.kv_cache_fp8 needs a GPU of compute capability 8.9 or later, this is "
            f"{device.name}: set it to false"
        )


def check_driver() -> None:
    """Raise ValueError if torch was built for CUDA but cannot use the GPU of this machine."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if torch.version.cuda is None or is_hidden or not Path("/proc/driver/nvidia/version").exists():
        return
    try:
        torch.cuda.init()
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"this machine has an NVIDIA GPU that torch, built for CUDA {torch.version.cuda}, cannot use: "
            f"{reason} Install a driver for that CUDA version, or install the CPU stack (make demo STACK=cpu)"
        ) from error


def refuse_scales_of_two() -> None:
    """Raise ValueError if vLLM would round the scales of FP8 to powers of two, against our environment."""
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

    if is_deep_gemm_e8m0_used():
        raise ValueError(
            "VLLM_USE_DEEP_GEMM_E8M0 is on: vLLM would round the scales of FP8 to powers of two, "
            "unlike rollout.fp8=simulate and the checks of a sync. Unset the variable, or set it to 0"
        )


def start_vllm(options: dict, captures_routes: bool):
    """Start vLLM; ValueError if this vLLM cannot return routed experts."""
    from vllm import LLM, EngineArgs

    refuse_beside_graphs_of_experts()
    if not torch.cuda.is_available():
        draw_seeded_tokens()
    if captures_routes:
        if "enable_return_routed_experts" not in {field.name for field in dataclasses.fields(EngineArgs)}:
            raise ValueError(f"this vLLM does not return routed experts: {WITHOUT_ROUTES}")
        options = options | {"enable_return_routed_experts": True}
    logging.getLogger("vllm.logging_utils.dump_input").disabled = True  # 100 kB of state per error
    try:
        return LLM(**options)
    except Exception as error:
        if captures_routes and "outed" in str(error) and "xperts" in str(error):
            raise ValueError(f"vLLM cannot return routed experts ({error}): {WITHOUT_ROUTES}") from error
        raise


GRAPHS_OF_EXPERTS: weakref.WeakSet[RolloutEngine] = weakref.WeakSet()  # MoE engines with CUDA graphs


def refuse_beside_graphs_of_experts() -> None:
    """Raise ValueError for a second engine in a process that has a MoE engine with CUDA graphs.

    vLLM has one workspace per process and every new engine reallocates it. The CUDA graphs of a MoE contain
    the address of the old workspace, so the first engine would read and write freed memory.
    """
    gc.collect()  # drop engines that nothing refers to
    if GRAPHS_OF_EXPERTS:
        raise ValueError(
            "a second vLLM engine in the process of a MoE engine frees memory that the first one's CUDA "
            "graphs use: set rollout.enforce_eager=true, or give the second engine a process of its own (a "
            "generative judge: reward.judge_path=module:function that asks a server)"
        )


# ------------------------------------------------------------------------------------------------------------
# Routed experts
# ------------------------------------------------------------------------------------------------------------
WITHOUT_ROUTES = "set rollout.capture_routes=off, and algorithm.router_replay to off or r2, not r3"


def invalid_route(num_experts: int) -> int:
    """Return the id that marks an invalid row of routes: no expert has the id, and the dtype can store it."""
    return 255 if num_experts < 256 else 32767


def validate_routes(captured: list[np.ndarray | None], num_rows: list[int], hf_config) -> list[Tensor]:
    """Return the routed experts of each completion [rows, L, K]: CPU, uint8, or int16 from 256 experts on.

    captured: from vLLM, one row per token except the last, dense layers included (their ids are ignored).
    num_rows: the expected number of rows of each completion.

    A row is invalid, and filled with invalid_route(), if an id is no expert's or occurs twice in a layer. All
    rows of a completion are invalid if the number of captured rows differs from num_rows. Raises RuntimeError
    if the number of layers or of experts per token differs from the model's.
    """
    num_layers = hf_config.num_hidden_layers
    top_k = hf_config.num_experts_per_tok
    num_experts = num_experts_of(hf_config)
    for ids in captured:
        if ids is not None and ids.shape[1:] != (num_layers, top_k):
            raise RuntimeError(
                f"the engine returns routes of {ids.shape[1]} layers and {ids.shape[2]} experts per token, "
                f"the model has {num_layers} and {top_k}: {WITHOUT_ROUTES}"
            )
    is_complete = [ids is not None and len(ids) == rows for ids, rows in zip(captured, num_rows)]
    tables = [
        ids if complete else np.zeros((rows, num_layers, top_k), np.uint8)
        for ids, rows, complete in zip(captured, num_rows, is_complete)
    ]
    ids_TLK = np.concatenate(tables) if tables else np.zeros((0, num_layers, top_k), np.uint8)
    is_moe = [is_moe_layer(hf_config, layer) for layer in range(num_layers)]
    sorted_TLK = np.sort(ids_TLK[:, is_moe], axis=-1)
    is_invalid_T = (sorted_TLK[..., -1] >= num_experts).any(-1)
    is_invalid_T |= (sorted_TLK[..., 1:] == sorted_TLK[..., :-1]).any((-1, -2))
    is_invalid_T |= ~np.repeat(np.array(is_complete, dtype=bool), num_rows)
    ids_TLK = ids_TLK.astype(np.uint8 if num_experts < 256 else np.int16)
    ids_TLK[is_invalid_T] = invalid_route(num_experts)
    tables = np.split(ids_TLK, np.cumsum(num_rows)[:-1])[: len(num_rows)]
    # Copy: a view would keep the routes of all completions in memory, and pickle would send them all.
    return [torch.from_numpy(ids.copy()) for ids in tables]


# ------------------------------------------------------------------------------------------------------------
# Environment
# ------------------------------------------------------------------------------------------------------------
def set_vllm_environment(on_gpu: bool, fp8: bool = False) -> None:
    """Set the environment variables that vLLM reads at import; values set by the user have priority.

    fp8: rollout.fp8 is on. On a GPU, CUDA_HOME then names the toolkit with which DeepGEMM compiles.
    """
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core lives in this process
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TRITON_F32_DEFAULT": "ieee",  # otherwise a float32 engine on a GPU computes in TF32
        "VLLM_USE_DEEP_GEMM_E8M0": "0",  # FP8 scales are float32 numbers instead of powers of two
    }
    if not on_gpu:
        settings |= {
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_USE_AOT_COMPILE": "0",
        }  # compilation costs more than it saves on CPUs
    toolkit = fp8_toolkit() if on_gpu and fp8 else None
    if toolkit is not None:
        # PATH stays as it is. With nvcc on PATH, vLLM takes kernels of FlashInfer, too (utils/flashinfer.py:
        # has_flashinfer), which cannot be linked with pip's toolkit, because its libraries are in lib and
        # not in lib64 (flashinfer/jit/cpp_ext.py, issue 5064 of FlashInfer).
        settings["CUDA_HOME"] = str(toolkit)
    for name, value in settings.items():
        os.environ.setdefault(name, value)

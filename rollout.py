"""Sample from a vLLM engine in the trainer's own process; it gets the policy's weights after every update.

There is one engine per rank, or per tensor_parallel neighbouring ranks, built under torchrun's environment
through vLLM's external launcher. It is driven by add_request() and step(), so that a completion can be scored
the moment it ends. This file knows no rewards and no algorithm: tokens go in; tokens, their log-probabilities
and the experts that they went through come out.

Reading order: settings, RolloutEngine (generate, sync, check_weights), what an engine needs and whether it is
here, routed experts, FP8, what runs inside vLLM's worker, vLLM's environment.
"""

import dataclasses
import gc
import json
import logging
import math
import os
import re
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from batch import Completion, Request
from kernels.fp8_block import BLOCK, fp8_round
from moe_model import expert_width, head_dim, is_moe_layer, num_experts_of, parameter_counts
from runtime.memory import GIB
from runtime.schedule import CacheRoom, WaitingLine
from settings import RolloutSettings


# ------------------------------------------------------------------------------------------------------------
# The engine
# ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SyncReport:
    """What one weight sync moved."""

    num_tensors: int
    num_bytes: int


class RolloutEngine:
    """vLLM with the policy's weights.

    model_path: folder of a Hugging Face checkpoint; only its configuration and tokenizer are read. Weights
        are random until the first sync(), which every run does before it samples: so the path of all later
        syncs is proven first.
    max_model_len: longest prompt + completion in tokens; KV memory is planned for it.
    settings: what else the engine is like. Ranks that share an engine (tensor_parallel) call generate() and
        sync() together. With expert_parallel sync() takes the rank's own experts.
    trainer_bytes: GPU memory that will be taken beside the engine (runtime.memory.trainer_bytes); without
        rollout.kv_cache_gib the engine takes no more than what it leaves.
    timeout_s: seconds that ranks of the engine wait for each other; None: what torch has.
    With rollout.sleep_level the engine sleeps from the start, so that a trainer can be built beside it.
    Raises ValueError where this machine or this vLLM cannot do what is asked.
    """

    def __init__(
        self,
        model_path: str | Path,
        max_model_len: int,
        settings: RolloutSettings,
        trainer_bytes: int = 0,
        timeout_s: float | None = None,
    ):
        self.on_gpu = torch.cuda.is_available()
        check_hardware(settings)
        set_vllm_environment(self.on_gpu)
        from transformers import AutoConfig

        self.settings, self.max_model_len = settings, max_model_len
        self.hf_config = AutoConfig.from_pretrained(
            model_path, local_files_only=True, trust_remote_code=False
        )
        self.num_experts = num_experts_of(self.hf_config)
        self.captures_routes = settings.capture_routes != "off" and self.num_experts > 0
        check_fp8(settings, self.hf_config)
        options = engine_options(model_path, max_model_len, settings, timeout_s)
        if self.on_gpu and settings.kv_cache_gib is None:
            free_and_total = torch.cuda.mem_get_info()
            share = memory_share(self.hf_config, settings, max_model_len, trainer_bytes, *free_and_total)
            options["gpu_memory_utilization"] = share
        self.llm = start_vllm(options, self.captures_routes)
        if self.num_experts and self.on_gpu and not settings.enforce_eager:
            GRAPHS_OF_EXPERTS.add(self)
        if settings.tensor_parallel > 1 and not self.on_gpu:  # the next run would find this one's segments
            for segment in Path("/dev/shm").glob("*-tp:*-cpushm_*"):
                segment.unlink(missing_ok=True)
        self.engine = self.llm.llm_engine
        self.stop_ids, self.stop_texts = stops_of(model_path, self.llm.get_tokenizer(), settings.stop)
        self.seconds_per_step = float("inf")  # mean of the last rollout: the time of a token while others run
        self.tokens_per_second = 0.0  # mean of the last rollout, all its sequences together
        self.policy_version: int | None = None  # number of updates behind the weights the engine holds
        self.seen = (0, 0)  # tokens and number of the last rollout's completions
        self.is_capturing = self.captures_routes
        self.sleep()

    def describe(self) -> str:
        """Say how many tokens the engine has room for and by which kernels it computes, in one line."""
        num_blocks, block_size = self.num_blocks, self.engine.vllm_config.cache_config.block_size
        num_tokens = num_blocks * block_size
        gib = num_tokens * kv_bytes_per_token(self.hf_config, self.settings) / GIB
        (kernels,) = self.llm.collective_rpc(kernels_in_worker)
        return (
            f"engine: {gib:.3g} GiB of keys and values hold {num_tokens:,} tokens, that is "
            f"{num_blocks // math.ceil(self.max_model_len / block_size):,} completions of full length "
            f"({self.max_model_len:,} tokens with their prompts; at most {self.settings.max_num_seqs} run at "
            f"once); {kernels}"
        )

    @property
    def num_blocks(self) -> int:
        """Return the blocks of keys and values that requests can have; vLLM keeps one for itself."""
        return self.engine.vllm_config.cache_config.num_gpu_blocks - 1

    def generate(
        self,
        requests: list[Request],
        policy_version: int,
        on_finished: Callable[[int, Completion], None] = lambda index, completion: None,
        on_step: Callable[[], object] = lambda: None,
        capture_routes: bool = True,
    ) -> list[Completion]:
        """Sample all requests in the order of a WaitingLine; return their completions in the order given.

        on_finished(index, completion) is called as each ends, on_step() after each step of the engine. Ranks
        that share an engine each give their own requests, of groups with numbers of their own, and get their
        own completions. capture_routes: return routed experts, if the engine can. Raises RuntimeError if the
        engine's weights are not those of policy_version.
        """
        if policy_version != self.policy_version:
            raise RuntimeError(
                f"the engine holds the weights after update {self.policy_version}, the policy is at "
                f"{policy_version}: a weight sync was skipped"
            )
        own, first = requests, 0
        if self.settings.tensor_parallel > 1:  # ranks of an engine must give it the same work in one order
            everyone = [None] * self.settings.tensor_parallel
            group = self.tensor_parallel_group()
            dist.all_gather_object(everyone, requests, group=group)
            first = sum(len(requests_of_rank) for requests_of_rank in everyone[: dist.get_rank(group)])
            requests = sum(everyone, [])
        end = first + len(own)

        def on_own_finished(index: int, completion: Completion) -> None:
            if first <= index < end:
                on_finished(index - first, completion)

        self.switch_capture(self.captures_routes and capture_routes)
        completions, captured = self.run_requests(requests, on_own_finished, on_step)
        completions, captured = completions[first:end], captured[first:end]
        if not self.is_capturing:
            return completions
        num_rows = [len(r.prompt_ids) + len(c.token_ids) - 1 for r, c in zip(own, completions)]
        routes = validate_routes(captured, num_rows, self.hf_config)
        return [dataclasses.replace(c, routed_experts=ids) for c, ids in zip(completions, routes)]

    def run_requests(
        self, requests: list[Request], on_finished: Callable, on_step: Callable
    ) -> tuple[list[Completion], list[np.ndarray | None]]:
        """Drive the engine: as many requests as it works on at once, the next as one ends.

        Returns the completion and the captured routes of each request.
        """
        start, num_steps = time.perf_counter(), 0
        waiting, num_running = WaitingLine(requests, self.settings.max_num_seqs), 0
        block_size = self.engine.vllm_config.cache_config.block_size
        room = CacheRoom(requests, self.num_blocks, block_size, self.settings.prefix_caching, self.seen)
        completions: list[Completion | None] = [None] * len(requests)
        captured: list[np.ndarray | None] = [None] * len(requests)
        while waiting or num_running:
            while waiting and num_running < self.settings.max_num_seqs and room.has_room_for(waiting.peek()):
                index = waiting.pop()
                prompt = {"prompt_token_ids": requests[index].prompt_ids}
                params = sampling_params(requests[index], self.stop_ids, self.stop_texts)
                self.engine.add_request(str(index), prompt, params)
                room.start(index)
                num_running += 1
            for output in self.step():
                index, sample = int(output.request_id), output.outputs[0]
                token_ids, logprobs = [*sample.token_ids], [*sample.logprobs.logprobs]
                seconds = time.perf_counter() - start
                completions[index] = Completion(token_ids, logprobs, sample.finish_reason, seconds)
                captured[index] = sample.routed_experts if self.is_capturing else None
                num_running -= 1
                room.end(index, len(token_ids))
                waiting.record_length(index, len(token_ids))
                on_finished(index, completions[index])
            room.take_step()
            on_step()
            num_steps += 1
        if num_steps:
            seconds = time.perf_counter() - start
            self.seconds_per_step, self.tokens_per_second = seconds / num_steps, room.tokens / seconds
            self.seen = (room.tokens, room.ended)
        return completions, captured

    def switch_capture(self, on: bool) -> None:
        """Have vLLM hand out routed experts, or not, from the next request on; none may be running.

        vLLM keeps the routes of a token where its keys and values lie, so prefixes that were cached while it
        did not are dropped. Off, an engine that could capture spends nothing on the host for it.
        """
        if not self.captures_routes:
            return
        scheduler = self.engine.engine_core.engine_core.scheduler
        scheduler._re_block_ids.clear()  # vLLM leaves those of requests that ended with a step on its way
        if on == self.is_capturing:
            return
        self.is_capturing = scheduler.enable_return_routed_experts = on
        self.llm.collective_rpc(switch_capture_in_worker, args=(on,))
        if on and not self.llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset, its prefixes have no captured routes")

    def step(self) -> list:
        """Take one step of vLLM and return the requests that ended; RuntimeError for whatever it raises."""
        try:
            return self.engine.step()
        except Exception as error:
            self.policy_version = None  # nothing is known of its state
            raise RuntimeError(
                f"the engine failed while sampling: {type(error).__name__}: {error}. Checkpoints are whole: "
                "the same command goes on from the newest"
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

        check_against: the same tensors again, for check_weights(); keys and values wake up after it, because
        gathering experts needs their room. Raises RuntimeError naming the parameters that were not covered,
        or the tensor the engine refused.
        """
        num_tensors, num_bytes, last_name = 0, 0, None
        self.policy_version = None  # a failed sync leaves an engine that refuses to generate

        def counted():
            nonlocal num_tensors, num_bytes, last_name
            for name, tensor in named_tensors:
                last_name = name
                is_fused = tensor.dim() == 3
                if is_fused and len(tensor) != self.num_experts:  # vLLM would fill the first ones only
                    raise ValueError(f"{name} holds {len(tensor)} experts, the model has {self.num_experts}")
                num_tensors, num_bytes = num_tensors + 1, num_bytes + tensor.numel() * tensor.element_size()
                yield name, tensor

        self.wake_up("weights")
        try:
            tensors = quantise_for_engine(counted(), self.settings.fp8, self.settings.simulate_format)
            (missing,) = self.llm.collective_rpc(load_weights_in_worker, args=(tensors, not self.on_gpu))
        except Exception as error:  # vLLM's loaders assert, or raise what they like
            raise RuntimeError(
                f"weight sync: the engine refused {last_name}: {error or type(error).__name__}"
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
                "weight sync: the prefix cache could not be reset, it would mix old and new policies"
            )
        if check_against is not None:
            self.check_weights(check_against)
        self.wake_up("kv_cache")
        self.policy_version = policy_version
        return SyncReport(num_tensors, num_bytes)

    def check_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Compare what the engine holds with the tensors of the last sync, by checksum in its own dtype.

        Call it while the engine's weights are awake. RuntimeError names what differs. What vLLM holds in FP8
        or splits over ranks is left out: the parity of log-probabilities alone proves it.
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
        """Take GPU memory again for "weights" or "kv_cache". Nothing at sleep_level 0."""
        if not self.settings.sleep_level:
            return
        try:
            self.llm.wake_up(tags=[tag])
        except Exception as error:
            raise RuntimeError(
                f"the engine could not take back the memory of its {tag}: {error}. What stands beside it is "
                "more than was planned: set rollout.kv_cache_gib below what the start printed"
            ) from error

    def sleep(self) -> None:
        """Free GPU memory for the update; the next sync() wakes the engine. Nothing at sleep_level 0."""
        if self.settings.sleep_level:
            self.policy_version = None
            self.llm.sleep(level=self.settings.sleep_level)


# ------------------------------------------------------------------------------------------------------------
# What an engine needs, and whether it is here
# ------------------------------------------------------------------------------------------------------------
def engine_options(
    model_path: str | Path, max_model_len: int, settings: RolloutSettings, timeout_s: float | None = None
) -> dict:
    """Translate the settings of an engine into vLLM's."""
    on_gpu = torch.cuda.is_available()
    options = {
        "model": str(model_path),
        "load_format": "dummy",
        "dtype": settings.dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "enable_prefix_caching": settings.prefix_caching,
        "logprobs_mode": "processed_logprobs",  # after temperature: what the trainer computes too
        "generation_config": "vllm",  # a checkpoint's own top_k or top_p would skew importance ratios
        "seed": 0,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "enforce_eager": not on_gpu or settings.enforce_eager,
        "enable_sleep_mode": settings.sleep_level > 0,
        "tensor_parallel_size": settings.tensor_parallel,
        "enable_expert_parallel": settings.expert_parallel,
    }
    if not on_gpu:
        # A prompt that is computed in parts makes vLLM rewind the random numbers of its request, which a
        # generator on the CPU cannot do. Without chunks a prompt that does not fit waits for the next step.
        options["enable_chunked_prefill"] = False
    elif settings.dtype == "bfloat16":  # logits as the trainer has them; in bfloat16 they have steps of 1/8
        options["hf_overrides"] = {"head_dtype": "float32"}
    if on_gpu and settings.capture_routes != "off":
        options["block_size"] = 64  # with capture vLLM lists the blocks of all running requests at every step
    if timeout_s is not None:
        options["distributed_timeout_seconds"] = math.ceil(timeout_s)
        options["cpu_distributed_timeout_seconds"] = math.ceil(timeout_s)
    if settings.kv_cache_gib is not None:  # the second is then only what vLLM wants to find free
        kv_cache_bytes = int(settings.kv_cache_gib * 2**30)
        options |= {"kv_cache_memory_bytes": kv_cache_bytes, "gpu_memory_utilization": 0.05}
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
    """Return the token ids and the texts that end a completion of the model in a folder.

    They are the end-of-sequence ids of tokenizer, config.json and generation_config.json (which alone lists
    a second one, as Qwen's do), and `more`. A text of `more` that is an added token, which decoded text may
    not show, is taken as its id. ValueError for an id that is no token's.
    """
    ids, texts = [tokenizer.eos_token_id], []
    for name in ("config.json", "generation_config.json"):
        file = Path(model_path) / name
        found = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        ids += found if isinstance(found, list) else [found]
    added = tokenizer.get_added_vocab()
    for stop in more:
        if isinstance(stop, int) and not 0 <= stop < len(tokenizer):
            raise ValueError(f"rollout.stop: {stop} is no token id, the vocabulary has {len(tokenizer)}")
        if isinstance(stop, int) or stop in added:
            ids.append(added.get(stop, stop))
        else:
            texts.append(stop)
    return list(dict.fromkeys(i for i in ids if i is not None)), texts


def sampling_params(request: Request, stop_ids: list[int], stop_texts: list[str]):
    """Translate a request into vLLM's parameters; its output comes when it has ended."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=request.temperature,
        seed=request.seed if request.temperature > 0 else None,
        max_tokens=request.max_new_tokens,
        min_tokens=request.min_new_tokens,
        logprobs=0,  # those of the sampled token only
        flat_logprobs=True,
        stop_token_ids=stop_ids,
        stop=stop_texts,
        include_stop_str_in_output=bool(stop_texts),
        detokenize=bool(stop_texts),  # reward workers turn tokens into text
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # it is this request's own
    )


def check_hardware(settings: RolloutSettings) -> None:
    """Raise ValueError for what this machine cannot do."""
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        check_driver()
    if settings.sleep_level and not on_gpu:
        raise ValueError("rollout.sleep_level needs a GPU: set it to 0")
    if settings.expert_parallel and not on_gpu:
        raise ValueError("rollout.expert_parallel needs a GPU, vLLM's CPU kernel has no part of the experts")
    if on_gpu and torch.cuda.get_device_capability() >= (8, 9):
        return
    device = torch.cuda.get_device_name() if on_gpu else "a CPU"
    needed = f"needs a GPU of compute capability 8.9 or later, this is {device}: set it to"
    if settings.fp8 == "on":
        raise ValueError(f"rollout.fp8 on {needed} simulate (weights rounded in the same way) or off")
    if settings.kv_cache_fp8:
        raise ValueError(f"rollout.kv_cache_fp8 {needed} false")


def check_driver() -> None:
    """Raise ValueError where a build of torch for GPUs cannot use the GPUs of this machine."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if torch.version.cuda is None or hidden or not Path("/proc/driver/nvidia/version").exists():
        return
    try:
        torch.cuda.init()
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"this machine has an NVIDIA GPU that torch, built for CUDA {torch.version.cuda}, cannot use: "
            f"{reason} Install a driver for that CUDA version, or hide the GPU (CUDA_VISIBLE_DEVICES=)"
        ) from error


def kv_bytes_per_token(hf_config, settings: RolloutSettings) -> int:
    """Return the bytes of keys and values that a rank holds of a token; ranks may hold the same heads."""
    heads = max(1, hf_config.num_key_value_heads // settings.tensor_parallel)
    itemsize = 1 if settings.kv_cache_fp8 else getattr(torch, settings.dtype).itemsize
    return 2 * hf_config.num_hidden_layers * heads * head_dim(hf_config) * itemsize


def engine_weight_bytes(hf_config, settings: RolloutSettings) -> int:
    """Return the bytes of the engine's weights on a rank; in FP8 the embeddings stay in 16 bits."""
    counts, itemsize = parameter_counts(hf_config), getattr(torch, settings.dtype).itemsize
    of_layers = 1 if settings.fp8 == "on" else itemsize
    num_bytes = counts.embeddings * itemsize + (counts.experts + counts.others) * of_layers
    return num_bytes // settings.tensor_parallel


ENGINE_EXTRA_BYTES = 4 * GIB  # CUDA graphs, workspaces, activations of a prefill: a guess, vLLM measures them
VLLM_SHARE = 0.92  # vLLM's default; what is left is for CUDA itself


def room_of_engine(trainer_bytes: int, free: int, total: int) -> float:
    """Return the bytes that vLLM may take of a GPU; a context is made before it looks at what is free."""
    return min(VLLM_SHARE * total, free - max(trainer_bytes, GIB))


def engine_memory(hf_config, settings: RolloutSettings, trainer_bytes: int, total: int) -> dict[str, int]:
    """Return the bytes of an engine by part; `KV cache` may be negative: what is missing for the rest.

    total: bytes of the GPU. Without rollout.kv_cache_gib keys and values take what is left of the room.
    """
    weights = engine_weight_bytes(hf_config, settings)
    if settings.kv_cache_gib is None:
        room = int(room_of_engine(trainer_bytes, total, total))
        kv_cache = room - weights - ENGINE_EXTRA_BYTES
    else:
        kv_cache = int(settings.kv_cache_gib * GIB)
    return {"engine weights": weights, "engine workspace": ENGINE_EXTRA_BYTES, "KV cache": kv_cache}


def memory_share(
    hf_config, settings: RolloutSettings, max_model_len: int, trainer_bytes: int, free: int, total: int
) -> float:
    """Return the share of a GPU that vLLM may take for weights, workspaces, keys and values.

        share = min(0.92 total, free - trainer_bytes) / total

    free and total: bytes of this GPU before the engine starts. ValueError, with settings that would fit, if
    that leaves no room for the weights and the keys and values of one completion of full length.
    """
    share = room_of_engine(trainer_bytes, free, total)

    def needed(settings: RolloutSettings) -> int:
        kv_cache = max_model_len * kv_bytes_per_token(hf_config, settings)
        return engine_weight_bytes(hf_config, settings) + kv_cache + ENGINE_EXTRA_BYTES

    if needed(settings) <= share:
        return share / total
    num_ranks, fitting = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), []
    for fp8 in dict.fromkeys((settings.fp8, "on")):
        for size in (n for n in range(1, num_ranks + 1) if num_ranks % n == 0):
            whole = fp8 != "on" or splits_into_blocks(hf_config, size)
            changed = settings.model_copy(update={"fp8": fp8, "tensor_parallel": size})
            if whole and needed(changed) <= share:
                fitting.append(f"rollout.tensor_parallel={size} rollout.fp8={fp8}")
    advice = [*fitting[:1], *["rollout.sleep_level=2"] * (settings.sleep_level == 0)]
    advice = " or ".join(advice) or "more GPUs, a shorter rollout.max_new_tokens or a smaller model"
    raise ValueError(
        f"this GPU is too small: of {total / GIB:.0f} GiB {free / GIB:.0f} are free, the trainer takes "
        f"{trainer_bytes / GIB:.0f} of them and the engine needs {needed(settings) / GIB:.0f} for weights, "
        f"graphs and one completion of full length; try {advice}, or set rollout.kv_cache_gib to go without "
        "this estimate"
    )


def splits_into_blocks(hf_config, tensor_parallel: int) -> bool:
    """Tell whether the parts of each expert are whole FP8 blocks."""
    return num_experts_of(hf_config) == 0 or expert_width(hf_config) % (tensor_parallel * BLOCK) == 0


def check_fp8(settings: RolloutSettings, hf_config) -> None:
    """Raise ValueError where vLLM's FP8 would not be that of kernels/fp8_block.py, or would not fit."""
    if settings.fp8 != "on":
        return
    size = 1 if settings.expert_parallel else settings.tensor_parallel
    if size > 1 and not splits_into_blocks(hf_config, size):
        width = expert_width(hf_config)
        raise ValueError(
            f"rollout.tensor_parallel {size} with rollout.fp8 on splits experts of width {width} into parts "
            f"of {width / size:g}, which are no whole blocks of {BLOCK}: vLLM pads them, and a sync would "
            "hold the whole model twice. Set rollout.expert_parallel=true or a tensor_parallel that divides "
            f"the {width / BLOCK:g} blocks of an expert"
        )
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

    if is_deep_gemm_e8m0_used():
        raise ValueError(
            "VLLM_USE_DEEP_GEMM_E8M0 is on: vLLM would round the scales of FP8 to powers of two, which "
            "neither rollout.fp8=simulate nor any check here does. Leave it unset, or set it to 0"
        )


def start_vllm(options: dict, captures_routes: bool):
    """Start vLLM with these options; ValueError if it cannot return routed experts."""
    from vllm import LLM, EngineArgs

    refuse_beside_graphs_of_experts()
    if captures_routes:
        if "enable_return_routed_experts" not in {field.name for field in dataclasses.fields(EngineArgs)}:
            raise ValueError(f"this vLLM does not return routed experts: {WITHOUT_ROUTES}")
        options = options | {"enable_return_routed_experts": True}
    logging.getLogger("vllm.logging_utils.dump_input").disabled = True  # its state, 100 kB, at every error
    try:
        return LLM(**options)
    except Exception as error:
        if captures_routes and "outed" in str(error) and "xperts" in str(error):
            raise ValueError(f"vLLM gives no routed experts ({error}): {WITHOUT_ROUTES}") from error
        raise


GRAPHS_OF_EXPERTS: weakref.WeakSet[RolloutEngine] = weakref.WeakSet()  # engines with both


def refuse_beside_graphs_of_experts() -> None:
    """Raise ValueError for one more engine in a process that holds a MoE engine with CUDA graphs.

    Each engine of vLLM makes the workspace of the process anew, and graphs of a MoE have the address of the
    old one in them: the first engine would read and write memory that is no longer its own.
    """
    gc.collect()  # an engine that nobody holds is none
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
    """Return the id that fills a row whose capture is invalid: it is no expert's and fits the dtype."""
    return 255 if num_experts < 256 else 32767


def validate_routes(captured: list[np.ndarray | None], num_rows: list[int], hf_config) -> list[Tensor]:
    """Return the routed experts of each completion [rows, L, K] on the CPU.

    They are uint8, or int16 from 256 experts on. captured: what vLLM returned, one row per token but the
    last, all hidden layers counted. A row is filled with invalid_route() if one of its ids is no expert's or
    stands twice in a layer, and so are all rows of a completion with another number of rows than num_rows
    says. Rows of dense layers are not looked at. RuntimeError if layers or experts per token are not the
    model's.
    """
    num_layers, top_k = hf_config.num_hidden_layers, hf_config.num_experts_per_tok
    num_experts = num_experts_of(hf_config)
    for ids in captured:
        if ids is not None and ids.shape[1:] != (num_layers, top_k):
            raise RuntimeError(
                f"the engine returns routes of {ids.shape[1]} layers and {ids.shape[2]} experts per token, "
                f"the model has {num_layers} and {top_k}: {WITHOUT_ROUTES}"
            )
    dtype = np.uint8 if num_experts < 256 else np.int16
    whole = [ids is not None and len(ids) == rows for ids, rows in zip(captured, num_rows)]
    invalid = [np.zeros((rows, num_layers, top_k), np.uint8) for rows, ok in zip(num_rows, whole) if not ok]
    parts = [ids if ok else invalid.pop(0) for ids, ok in zip(captured, whole)]
    ids_TLK = np.concatenate(parts) if parts else np.zeros((0, num_layers, top_k), np.uint8)
    is_moe = [is_moe_layer(hf_config, layer) for layer in range(num_layers)]
    sorted_TLK = np.sort(ids_TLK[:, is_moe], axis=-1)
    bad_T = (sorted_TLK[..., -1] >= num_experts).any(-1)
    bad_T |= (sorted_TLK[..., 1:] == sorted_TLK[..., :-1]).any((-1, -2))
    bad_T |= ~np.repeat(np.array(whole, dtype=bool), num_rows)
    ids_TLK = ids_TLK.astype(dtype)
    ids_TLK[bad_T] = invalid_route(num_experts)
    parts = np.split(ids_TLK, np.cumsum(num_rows)[:-1])[: len(num_rows)]
    return [torch.from_numpy(ids.copy()) for ids in parts]  # a view would keep, and send, those of all


# ------------------------------------------------------------------------------------------------------------
# FP8
# ------------------------------------------------------------------------------------------------------------
FP8_QUANTIZATION = {"ignore": ["re:.*mlp\\.gate$"]}  # the router; vLLM leaves out head, embeddings, norms


def simulate_rounding(
    named_tensors: Iterable[tuple[str, Tensor]], round_weight: Callable[[Tensor], Tensor] = fp8_round
) -> Iterator[tuple[str, Tensor]]:
    """Round what vLLM would quantise: linear layers and experts, no router and no head.

    Projections that vLLM fuses (queries, keys, values; gate and up of a dense layer) are rounded as one
    matrix, as there.
    """
    held: dict[str, dict[str, Tensor]] = {}
    for name, tensor in named_tensors:
        if not name.removesuffix(".weight").endswith(("_proj", ".w1", ".w2", ".w3")):
            yield name, tensor
            continue
        if name.endswith("experts.gate_up_proj"):  # [E, 2I, D]; vLLM pads both halves to whole blocks
            yield name, round_weight(tensor.unflatten(1, (2, -1))).flatten(1, 2)
            continue
        target = engine_name(name)
        parts = held.setdefault(target, {})
        parts[name] = tensor
        if len(parts) == (3 if ".qkv_proj." in target else 2 if ".gate_up_proj." in target else 1):
            rounded = round_weight(torch.cat(list(held.pop(target).values()), dim=-2))
            yield from zip(parts, rounded.split([len(part) for part in parts.values()]))
    if held:
        raise ValueError(f"no partner of {', '.join(name for parts in held.values() for name in parts)}")


ROUNDINGS = {"fp8": fp8_round, "mxfp4": mxfp4_round}  # rollout.simulate_format


def quantise_for_engine(
    named_tensors: Iterable[tuple[str, Tensor]], fp8: str, simulate_format: str = "fp8"
) -> Iterable[tuple[str, Tensor]]:
    """Turn the policy's tensors into what a sync sends."""
    match fp8:
        case "simulate":
            return simulate_rounding(named_tensors, ROUNDINGS[simulate_format])
        case "on":  # vLLM quantises: give it what a bfloat16 trainer computes with
            return ((name, tensor.bfloat16()) for name, tensor in named_tensors)
        case "off":
            return named_tensors


# ------------------------------------------------------------------------------------------------------------
# Environment
# ------------------------------------------------------------------------------------------------------------
def set_vllm_environment(on_gpu: bool) -> None:
    """Set what vLLM reads from the environment when it is imported; what a user has set stays."""
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core lives in this process
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TRITON_F32_DEFAULT": "ieee",  # a float32 engine on a GPU would compute in TF32
        "VLLM_USE_DEEP_GEMM_E8M0": "0",  # scales of FP8 are float32 numbers, not powers of two
    }
    if not on_gpu:
        settings |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_USE_AOT_COMPILE": "0"}  # costs more than it saves
    for name, value in settings.items():
        os.environ.setdefault(name, value)


# ------------------------------------------------------------------------------------------------------------
# A second engine, for a generative judge
# ------------------------------------------------------------------------------------------------------------
def load_greedy_chat(path: str, batch_size: int, max_tokens: int) -> Callable[[list[str]], list[str]]:
    """Start a second vLLM engine in this process; return a function from questions to its greedy answers.

    A long question loses its beginning. Tried after the policy's engine on 1 and 2 CPU ranks with vLLM 0.30:
    the answers are those of transformers, but a MoE judge after a dense policy fails.
    """
    on_gpu = torch.cuda.is_available()
    set_vllm_environment(on_gpu)
    from vllm import LLM, SamplingParams

    refuse_beside_graphs_of_experts()
    llm = LLM(
        path,
        load_format="safetensors",
        dtype="auto" if on_gpu else "float32",
        max_num_seqs=batch_size,
        kv_cache_memory_bytes=1 << 30,
        max_model_len=-1,
        gpu_memory_utilization=0.01,  # the cache above is all it takes
        distributed_executor_backend="external_launcher" if "RANK" in os.environ else None,
        enforce_eager=not on_gpu,
        generation_config="vllm",
        use_tqdm_on_load=False,
    )
    half = llm.model_config.max_model_len // 2
    options = {
        "sampling_params": SamplingParams(temperature=0.0, max_tokens=min(max_tokens, half)),
        "tokenization_kwargs": {"truncate_prompt_tokens": half, "truncation_side": "left"},
        "chat_template": None if llm.get_tokenizer().chat_template else "{{ messages[0].content }}",
        "use_tqdm": False,
    }

    def generate(questions: list[str]) -> list[str]:
        chats = [[{"role": "user", "content": question}] for question in questions]
        return [output.outputs[0].text for output in llm.chat(chats, **options)]

    return generate

"""The sampler: a vLLM engine in the trainer's own process; it gets the policy's weights after every update.

One engine per rank, or per tensor_parallel neighbouring ranks, built under torchrun's environment through
vLLM's external launcher. It is driven by add_request() and step(), so that a completion can be scored the
moment it ends. Knows no rewards and no algorithm: tokens in; tokens, their log-probabilities and the experts
they went through out.

Reading order: RolloutEngine (generate, sync, check_weights), longest first, routed experts, FP8, vLLM's
environment. What runs inside vLLM's worker is in experiments/vllm_worker.py.
"""

import dataclasses
import heapq
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from experiments.vllm_worker import compare_weights_in_worker, engine_name, load_weights_in_worker
from kernels.fp8_block import fp8_round


@dataclass(frozen=True)
class Completion:
    """One sampled completion. A final end-of-sequence token is part of it."""

    token_ids: list[int]
    logprobs: list[float]  # nats, of each token under the engine's policy at the request's temperature
    finish_reason: str  # "stop": the policy ended it; "length": at max_new_tokens; "cut": not yet finished
    seconds: float  # from the start of generate() to its last token
    routed_experts: Tensor | None = None  # [prompt + completion - 1, L, K] on the CPU, see checked_routes()
    spans: tuple[tuple[int, int], ...] = ()  # (step of the policy, tokens drawn from it), one after another


@dataclass(frozen=True)
class Request:
    """One completion to sample."""

    prompt_ids: list[int]
    seed: int  # of its own random numbers: the sample does not depend on what else is in the batch
    temperature: float  # 0 takes the most likely token
    max_new_tokens: int  # of the whole completion
    min_new_tokens: int = 0  # no end of sequence before
    group: int = 0  # completions of one prompt have the same
    expected_tokens: float = 0.0  # the longest expected start first; where all are equal, in the order given
    guessed: bool = False  # nothing is known of this prompt: its first completions tell what to expect
    reward_tokens: float = 0.0  # counts as so many tokens more in that order: its reward takes long too
    can_be_cut: bool = True  # by generate(..., enough)
    begun: Completion | None = None  # goes on from this one, which was cut


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
    dtype: "float32" or "bfloat16"; the engine rounds what it is given in sync().
    kv_cache_gib: memory for keys and values; None lets vLLM take its default share of a GPU.
    sleep_level: what sleep() frees on a GPU: 0 nothing, 1 moves weights to the host, 2 drops them.
    capture_routes: return the experts that every token went through; nothing for a dense model.
    fp8: "off"; "on", vLLM's block-wise FP8 weights and activations, quantised anew at each sync (GPUs);
        "simulate", weights rounded through the same format at sync, products in dtype (anywhere).
    kv_cache_fp8: keys and values in FP8 with scale 1 (GPUs).
    tensor_parallel: neighbouring ranks that share an engine; all of them call generate() and sync() together.
    expert_parallel: each of these ranks holds whole experts, E / tensor_parallel of them, instead of a part
        of each (GPUs); sync() then takes the rank's own experts.
    Raises ValueError where this machine or this vLLM cannot do what is asked.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        max_model_len: int,
        max_num_seqs: int,
        dtype: str,
        kv_cache_gib: float | None,
        prefix_caching: bool,
        sleep_level: int,
        capture_routes: bool = False,
        fp8: str = "off",
        kv_cache_fp8: bool = False,
        tensor_parallel: int = 1,
        expert_parallel: bool = False,
    ):
        self.on_gpu = torch.cuda.is_available()
        check_hardware(sleep_level, fp8, kv_cache_fp8, expert_parallel)
        set_vllm_environment(self.on_gpu)
        from transformers import AutoConfig

        hf_config = AutoConfig.from_pretrained(model_path, local_files_only=True)
        self.num_experts = getattr(hf_config, "num_experts", 0)
        self.captures_routes = capture_routes and self.num_experts > 0
        options = {
            "model": str(model_path),
            "load_format": "dummy",
            "dtype": dtype,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "enable_prefix_caching": prefix_caching,
            "logprobs_mode": "processed_logprobs",  # after temperature: what the trainer computes too
            "generation_config": "vllm",  # a checkpoint's own top_k or top_p would skew importance ratios
            "seed": 0,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "enforce_eager": not self.on_gpu,
            "enable_sleep_mode": sleep_level > 0,
            "tensor_parallel_size": tensor_parallel,
            "enable_expert_parallel": expert_parallel,
        }
        if kv_cache_gib is not None:  # the second is then only what vLLM wants to find free
            options |= {"kv_cache_memory_bytes": int(kv_cache_gib * 2**30), "gpu_memory_utilization": 0.05}
        if "RANK" in os.environ:
            options["distributed_executor_backend"] = "external_launcher"
        if fp8 == "on":
            options |= {"quantization": "fp8_per_block", "quantization_config": FP8_QUANTIZATION}
        if kv_cache_fp8:
            options["kv_cache_dtype"] = "fp8"
        self.llm = start_vllm(options, self.captures_routes)
        if tensor_parallel > 1 and not self.on_gpu:  # else the next run would find this one's segments
            for segment in Path("/dev/shm").glob("*-tp:*-cpushm_*"):
                segment.unlink(missing_ok=True)
        self.engine = self.llm.llm_engine
        self.sleep_level, self.fp8, self.tensor_parallel = sleep_level, fp8, tensor_parallel
        self.max_num_seqs = max_num_seqs
        self.seconds_per_step = float("inf")  # of the last rollout: what a token takes while others run
        self.hf_config = hf_config
        self.policy_version: int | None = None  # number of updates behind the weights the engine holds

    def generate(
        self,
        requests: list[Request],
        policy_version: int,
        on_finished: Callable[[int, Completion], None] = lambda index, completion: None,
        on_step: Callable[[], object] = lambda: None,
        enough: Callable[[], bool] | None = None,
    ) -> list[Completion]:
        """Sample all requests, in the order of a WaitingLine; on_finished(index, completion) as each ends.

        on_step is called after each step of the engine. enough, asked after each step, ends what can be cut
        as soon as it says so: such completions have the tokens so far, or none, and finish_reason "cut".
        Ranks that share an engine each give their own requests, of groups with numbers of their own, and get
        their own completions.
        Raises RuntimeError if the engine's weights are not those of policy_version.
        """
        if policy_version != self.policy_version:
            raise RuntimeError(
                f"the engine holds the weights after update {self.policy_version}, the policy is at "
                f"{policy_version}: a weight sync was skipped"
            )
        own, first = requests, 0
        if self.tensor_parallel > 1:  # all ranks of an engine must give it the same work in the same order
            everyone = [None] * self.tensor_parallel
            group = self.tensor_parallel_group()
            dist.all_gather_object(everyone, requests, group=group)
            first = sum(len(of_rank) for of_rank in everyone[: dist.get_rank(group)])
            requests = sum(everyone, [])
        end = first + len(own)

        def of_own(index: int, completion: Completion) -> None:
            if first <= index < end:
                on_finished(index - first, completion)

        completions, captured = self.drive(requests, of_own, on_step, enough)
        completions, captured = completions[first:end], captured[first:end]
        if not self.captures_routes:
            return completions
        num_rows = [len(r.prompt_ids) + len(c.token_ids) - 1 for r, c in zip(own, completions)]
        routes = checked_routes(captured, num_rows, self.hf_config)
        return [dataclasses.replace(c, routed_experts=ids) for c, ids in zip(completions, routes)]

    def drive(
        self,
        requests: list[Request],
        on_finished: Callable,
        on_step: Callable,
        enough: Callable[[], bool] | None,
    ) -> tuple[list[Completion], list[np.ndarray | None]]:
        """The engine's loop: as many requests as it works on at once, the next as one ends.

        Returns the completion and the captured routes of each request.
        """
        start, num_steps = time.perf_counter(), 0
        waiting, running = WaitingLine(requests), {}  # {index: (token ids, logprobs) so far}
        completions = [request.begun or Completion([], [], "cut", 0.0) for request in requests]
        captured: list[np.ndarray | None] = [None] * len(requests)

        def end(index: int, finish_reason: str) -> None:
            begun, (token_ids, logprobs) = completions[index], running.pop(index)
            spans = (*begun.spans, (self.policy_version, len(token_ids) - len(begun.token_ids)))
            seconds = time.perf_counter() - start
            completions[index] = Completion(token_ids, logprobs, finish_reason, seconds, spans=spans)

        while waiting or running:
            while waiting and len(running) < self.max_num_seqs:
                index = waiting.pop()
                begun = completions[index]
                running[index] = ([*begun.token_ids], [*begun.logprobs])
                prompt = {"prompt_token_ids": requests[index].prompt_ids + begun.token_ids}
                params = sampling_params(requests[index], in_parts=enough is not None)
                self.engine.add_request(str(index), prompt, params)
            for output in self.step():
                index, sample = int(output.request_id), output.outputs[0]
                token_ids, logprobs = running[index]
                token_ids += sample.token_ids
                logprobs += sample.logprobs.logprobs
                if output.finished:
                    end(index, sample.finish_reason)
                    captured[index] = sample.routed_experts if self.captures_routes else None
                    waiting.note(index, len(token_ids))
                    on_finished(index, completions[index])
            on_step()
            num_steps += 1
            if enough is not None and enough():
                cut = [index for index in running if requests[index].can_be_cut]
                self.engine.abort_request([str(index) for index in cut])
                for index in cut:
                    end(index, "cut")
                waiting.cut()
        if num_steps:
            self.seconds_per_step = (time.perf_counter() - start) / num_steps
        return completions, captured

    def step(self) -> list:
        """One step of vLLM; RuntimeError for whatever it raises."""
        try:
            return self.engine.step()
        except Exception as error:
            self.policy_version = None  # nothing is known of its state
            raise RuntimeError(
                f"the engine failed while sampling: {type(error).__name__}: {error}. Checkpoints are whole: "
                "the same command goes on from the newest"
            ) from error

    def tensor_parallel_group(self):
        """The process group of the ranks that share this engine."""
        from vllm.distributed.parallel_state import get_tp_group

        return get_tp_group().cpu_group

    def sync(self, named_tensors: Iterable[tuple[str, Tensor]], policy_version: int) -> SyncReport:
        """Replace all weights by named_tensors (Hugging Face names, fused experts); forgets cached prefixes.

        Raises RuntimeError naming the parameters that were not covered, or the tensor the engine refused.
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

        if self.sleep_level:
            self.llm.wake_up(tags=["weights"])
        try:
            tensors = as_engine_gets_them(counted(), self.fp8)
            (missing,) = self.llm.collective_rpc(load_weights_in_worker, args=(tensors, not self.on_gpu))
        except Exception as error:  # vLLM's loaders assert, or raise what they like
            raise RuntimeError(
                f"weight sync: the engine refused {last_name}: {error or type(error).__name__}"
            ) from error
        if missing:
            only_experts = {name.rpartition(".")[2] for name in missing} == {"w13_weight", "w2_weight"}
            raise RuntimeError(
                f"weight sync: {len(missing)} parameters of the engine were not covered, first: "
                f"{', '.join(missing[:3])}"
                + "; this vLLM does not take fused experts, see requirements.txt"
                * only_experts
            )
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(
                "weight sync: the prefix cache could not be reset, it would mix old and new policies"
            )
        if self.sleep_level:
            self.llm.wake_up(tags=["kv_cache"])
        self.policy_version = policy_version
        return SyncReport(num_tensors, num_bytes)

    def check_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Compare what the engine holds with the tensors of the last sync, by checksum in its own dtype.

        To be called after sync() and before sleep(). RuntimeError names what differs. What vLLM holds in FP8
        or splits over ranks is left out: it is proven by the parity of log-probabilities alone.
        """
        tensors = as_engine_gets_them(named_tensors, self.fp8)
        (differing,) = self.llm.collective_rpc(compare_weights_in_worker, args=(tensors,))
        if differing:
            self.policy_version = None
            raise RuntimeError(
                f"weight sync: the engine holds other values than the policy's in {len(differing)} "
                f"parameters, first: {', '.join(differing[:3])}"
            )

    def sleep(self) -> None:
        """Free GPU memory for the update; the next sync() wakes the engine. Nothing at sleep_level 0."""
        if self.sleep_level:
            self.policy_version = None
            self.llm.sleep(level=self.sleep_level)


def longest_first(
    sizes: list[float], num_bins: int, load: list[float] | None = None, room: list[int] | None = None
) -> list[int]:
    """The bin of each item: the largest goes first, each to the bin with the least (LPT, Graham 1969).

    load: what the bins hold already; room: how many items each takes, None: any number. Equal items go in
    their order, to equal bins in theirs.
    """
    bins, room = [0] * len(sizes), list(room or [len(sizes)] * num_bins)
    heap = [(held, number) for number, held in enumerate(load or [0.0] * num_bins) if room[number]]
    heapq.heapify(heap)
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        held, bins[item] = heapq.heappop(heap)
        room[bins[item]] -= 1
        if room[bins[item]]:
            heapq.heappush(heap, (held + sizes[item], bins[item]))
    return bins


class WaitingLine:
    """Requests that an engine has not started yet: the longest expected first, equal ones in their order.

    That bounds the tail: a long completion that starts last runs alone at the end, and so does a slow reward.
    Siblings, expected alike, stay next to each other and share their prompt's keys and values.
    Of a group of which nothing is known one sibling goes ahead of all others, and the group counts as the
    longest until one has finished; then what its finished siblings took on average stands for the rest [ours:
    the best of four rules simulated, see the README].
    """

    def __init__(self, requests: list[Request]):
        self.requests, self.left = requests, set(range(len(requests)))
        self.expected = [
            r.reward_tokens + (r.max_new_tokens if r.guessed else r.expected_tokens) for r in requests
        ]
        self.siblings: dict[int, list[int]] = {}  # {group: requests}, of groups of which nothing is known
        self.finished: dict[int, list[int]] = {}  # {group: tokens of finished siblings}
        for index, request in enumerate(requests):
            if request.guessed:
                if request.group not in self.siblings:
                    self.expected[index] = math.inf
                self.siblings.setdefault(request.group, []).append(index)
        self.heap = [(-tokens, index) for index, tokens in enumerate(self.expected)]
        heapq.heapify(self.heap)

    def __len__(self) -> int:
        return len(self.left)

    def pop(self) -> int:
        """The index of the next request."""
        while True:
            tokens, index = heapq.heappop(self.heap)
            if index in self.left and -tokens == self.expected[index]:  # else it was entered anew
                self.left.remove(index)
                return index

    def note(self, index: int, num_tokens: int) -> None:
        """A request has ended with num_tokens."""
        group = self.requests[index].group
        if self.requests[index].guessed:
            seen = self.finished.setdefault(group, [])
            seen.append(num_tokens)
            for sibling in self.left.intersection(self.siblings[group]):
                self.expected[sibling] = self.requests[sibling].reward_tokens + sum(seen) / len(seen)
                heapq.heappush(self.heap, (-self.expected[sibling], sibling))

    def cut(self) -> None:
        """Forget the requests that can be cut."""
        self.left = {index for index in self.left if not self.requests[index].can_be_cut}


def sampling_params(request: Request, in_parts: bool):
    """vLLM's parameters of a request; in_parts: its output comes token by token, else when it has ended."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    begun = len(request.begun.token_ids) if request.begun else 0
    return SamplingParams(
        temperature=request.temperature,
        seed=request.seed if request.temperature > 0 else None,
        max_tokens=request.max_new_tokens - begun,
        min_tokens=max(0, request.min_new_tokens - begun),
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if in_parts else RequestOutputKind.FINAL_ONLY,
    )


def check_hardware(sleep_level: int, fp8: str, kv_cache_fp8: bool, expert_parallel: bool) -> None:
    """ValueError for what this machine cannot do."""
    on_gpu = torch.cuda.is_available()
    if sleep_level and not on_gpu:
        raise ValueError("rollout.sleep_level needs a GPU: set it to 0")
    if expert_parallel and not on_gpu:
        raise ValueError("rollout.expert_parallel needs a GPU, vLLM's CPU kernel has no part of the experts")
    if on_gpu and torch.cuda.get_device_capability() >= (8, 9):
        return
    device = torch.cuda.get_device_name() if on_gpu else "a CPU"
    needed = f"needs a GPU of compute capability 8.9 or later, this is {device}: set it to"
    if fp8 == "on":
        raise ValueError(f"rollout.fp8 on {needed} simulate (weights rounded in the same way) or off")
    if kv_cache_fp8:
        raise ValueError(f"rollout.kv_cache_fp8 {needed} false")


def start_vllm(options: dict, captures_routes: bool):
    """vLLM's LLM with these options; ValueError if it cannot return routed experts."""
    from vllm import LLM, EngineArgs

    if captures_routes:
        if "enable_return_routed_experts" not in {field.name for field in dataclasses.fields(EngineArgs)}:
            raise ValueError(f"this vLLM does not return routed experts: {WITHOUT_ROUTES}")
        options = options | {"enable_return_routed_experts": True}
    try:
        return LLM(**options)
    except Exception as error:
        if captures_routes and "outed" in str(error) and "xperts" in str(error):
            raise ValueError(f"vLLM gives no routed experts ({error}): {WITHOUT_ROUTES}") from error
        raise


# ------------------------------------------------------------------------------------------------------------
# Routed experts
# ------------------------------------------------------------------------------------------------------------
WITHOUT_ROUTES = "set rollout.capture_routes=false, and algorithm.router_replay to off or r2, not r3"


def no_route(num_experts: int) -> int:
    """The id that stands in all places of a row whose capture is invalid: no expert's, fits the dtype."""
    return 255 if num_experts < 256 else 32767


def checked_routes(captured: list[np.ndarray | None], num_rows: list[int], hf_config) -> list[Tensor]:
    """Routed experts of each completion [rows, L, K] on the CPU, uint8 (int16 from 256 experts on).

    captured: what vLLM returned, one row per token but the last, all hidden layers counted. A row with an id
    that is no expert's or an id twice in a layer, and all rows of a completion with another number of rows,
    become no_route(). Rows of dense layers are not looked at. RuntimeError if layers or experts per token are
    not the model's.
    """
    num_layers, top_k = hf_config.num_hidden_layers, hf_config.num_experts_per_tok
    num_experts = hf_config.num_experts
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
    is_moe = [
        layer not in hf_config.mlp_only_layers and (layer + 1) % hf_config.decoder_sparse_step == 0
        for layer in range(num_layers)
    ]
    sorted_TLK = np.sort(ids_TLK[:, is_moe], axis=-1)
    bad_T = (sorted_TLK[..., -1] >= num_experts).any(-1)
    bad_T |= (sorted_TLK[..., 1:] == sorted_TLK[..., :-1]).any((-1, -2))
    bad_T |= ~np.repeat(np.array(whole, dtype=bool), num_rows)
    ids_TLK = ids_TLK.astype(dtype)
    ids_TLK[bad_T] = no_route(num_experts)
    parts = np.split(ids_TLK, np.cumsum(num_rows)[:-1])[: len(num_rows)]
    return [torch.from_numpy(ids.copy()) for ids in parts]  # a view would keep, and send, those of all


# ------------------------------------------------------------------------------------------------------------
# FP8
# ------------------------------------------------------------------------------------------------------------
FP8_QUANTIZATION = {"ignore": ["re:.*mlp\\.gate$"]}  # the router; vLLM leaves out head, embeddings, norms


def simulate_fp8(named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """fp8_round() of what vLLM would quantise: linear layers and experts; not the router, lm_head, the rest.

    Projections that vLLM fuses (queries, keys, values; gate and up of a dense layer) are rounded as one
    matrix, as there.
    """
    held: dict[str, dict[str, Tensor]] = {}
    for name, tensor in named_tensors:
        if not name.removesuffix(".weight").endswith("_proj"):
            yield name, tensor
            continue
        if name.endswith("experts.gate_up_proj"):  # [E, 2I, D]; vLLM pads both halves to whole blocks
            yield name, fp8_round(tensor.unflatten(1, (2, -1))).flatten(1, 2)
            continue
        target = engine_name(name)
        parts = held.setdefault(target, {})
        parts[name] = tensor
        if len(parts) == (3 if ".qkv_proj." in target else 2 if ".gate_up_proj." in target else 1):
            rounded = fp8_round(torch.cat(list(held.pop(target).values()), dim=-2))
            yield from zip(parts, rounded.split([len(part) for part in parts.values()]))
    if held:
        raise ValueError(f"no partner of {', '.join(name for parts in held.values() for name in parts)}")


def as_engine_gets_them(
    named_tensors: Iterable[tuple[str, Tensor]], fp8: str
) -> Iterable[tuple[str, Tensor]]:
    """The policy's tensors as a sync sends them."""
    match fp8:
        case "simulate":
            return simulate_fp8(named_tensors)
        case "on":  # vLLM quantises: give it what a bfloat16 trainer computes with
            return ((name, tensor.bfloat16()) for name, tensor in named_tensors)
        case "off":
            return named_tensors


# ------------------------------------------------------------------------------------------------------------
# Environment
# ------------------------------------------------------------------------------------------------------------
def set_vllm_environment(on_gpu: bool) -> None:
    """Settings that vLLM reads from the environment when it is imported; what a user has set stays."""
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core lives in this process
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TRITON_F32_DEFAULT": "ieee",  # else a float32 engine on a GPU would compute in TF32
    }
    if not on_gpu:
        settings |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_USE_AOT_COMPILE": "0"}  # costs more than it saves
    for name, value in settings.items():
        os.environ.setdefault(name, value)

"""The sampler: a vLLM engine in the trainer's own process; it gets the policy's weights after every update.

One engine per rank (tensor parallel 1), built under torchrun's environment through vLLM's external launcher.
It is driven by add_request() and step(), so that a completion can be scored the moment it ends. Knows no
rewards and no algorithm: tokens in, tokens and their log-probabilities out.
"""

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Request:
    """One completion to sample."""

    prompt_ids: list[int]
    seed: int  # of its own random numbers: the sample does not depend on what else is in the batch
    temperature: float  # 0 takes the most likely token
    max_new_tokens: int


@dataclass(frozen=True)
class Completion:
    """One sampled completion. A final end-of-sequence token is part of it."""

    token_ids: list[int]
    logprobs: list[float]  # nats, of each token under the engine's policy at the request's temperature
    finish_reason: str  # "stop": the policy ended it; "length": cut at max_new_tokens
    seconds: float  # from the start of generate() to its last token


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
    ):
        self.on_gpu = torch.cuda.is_available()
        if sleep_level and not self.on_gpu:
            raise ValueError("rollout.sleep_level needs a GPU: set it to 0")
        set_vllm_environment(self.on_gpu)
        from vllm import LLM

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
        }
        if kv_cache_gib is not None:
            options["kv_cache_memory_bytes"] = int(kv_cache_gib * 2**30)
        if "RANK" in os.environ:
            options["distributed_executor_backend"] = "external_launcher"
        self.llm = LLM(**options)
        self.engine = self.llm.llm_engine
        self.sleep_level = sleep_level
        self.num_experts = getattr(self.llm.model_config.hf_config, "num_experts", 0)
        self.policy_version: int | None = None  # number of updates behind the weights the engine holds

    def generate(
        self,
        requests: list[Request],
        policy_version: int,
        on_finished: Callable[[int, Completion], None] = lambda index, completion: None,
    ) -> list[Completion]:
        """Sample all requests; on_finished(index, completion) is called as each one ends.

        Raises RuntimeError if the engine's weights are not those of policy_version.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if policy_version != self.policy_version:
            raise RuntimeError(
                f"the engine holds the weights after update {self.policy_version}, the policy is at "
                f"{policy_version}: a weight sync was skipped"
            )
        start = time.perf_counter()
        completions: list[Completion | None] = [None] * len(requests)
        for index, request in enumerate(requests):
            params = SamplingParams(
                temperature=request.temperature,
                seed=request.seed if request.temperature > 0 else None,
                max_tokens=request.max_new_tokens,
                logprobs=0,  # of the sampled token only
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            self.engine.add_request(str(index), {"prompt_token_ids": request.prompt_ids}, params)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                index, sample = int(output.request_id), output.outputs[0]
                completions[index] = Completion(
                    token_ids=list(sample.token_ids),
                    logprobs=list(sample.logprobs.logprobs),
                    finish_reason=sample.finish_reason,
                    seconds=time.perf_counter() - start,
                )
                on_finished(index, completions[index])
        assert None not in completions, "vLLM lost a request"
        return completions

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
            (missing,) = self.llm.collective_rpc(load_weights_in_worker, args=(counted(), not self.on_gpu))
        except Exception as error:  # vLLM's loaders assert, or raise what they like
            raise RuntimeError(
                f"weight sync: the engine refused {last_name}: {error or type(error).__name__}"
            ) from error
        if missing:
            raise RuntimeError(
                f"weight sync: {len(missing)} parameters of the engine were not covered, first: "
                f"{', '.join(missing[:3])}"
            )
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(
                "weight sync: the prefix cache could not be reset, it would mix old and new policies"
            )
        if self.sleep_level:
            self.llm.wake_up(tags=["kv_cache"])
        self.policy_version = policy_version
        return SyncReport(num_tensors, num_bytes)

    def sleep(self) -> None:
        """Free GPU memory for the update; the next sync() wakes the engine. Nothing at sleep_level 0."""
        if self.sleep_level:
            self.policy_version = None
            self.llm.sleep(level=self.sleep_level)


def set_vllm_environment(on_gpu: bool) -> None:
    """Settings that vLLM reads from the environment when it is imported; what a user has set stays."""
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core lives in this process
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if not on_gpu:
        settings |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_USE_AOT_COMPILE": "0"}  # costs more than it saves
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def load_weights_in_worker(worker, named_tensors: Iterable[tuple[str, Tensor]], on_cpu: bool) -> list[str]:
    """Runs inside vLLM's worker: reload layer by layer; returns the parameters that got nothing."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model = worker.model_runner.get_model()
    # The loader reports experts without the module that holds them.
    expected = {name.replace(".routed_experts.", ".") for name, _ in model.named_parameters()}
    with set_current_vllm_config(worker.vllm_config), torch.no_grad():
        initialize_layerwise_reload(model)
        loaded = model.load_weights(named_tensors)
        finalize_layerwise_reload(model, worker.model_runner.model_config)
        if on_cpu:
            repack_for_cpu_kernels(model)
    return sorted(expected - loaded)


def repack_for_cpu_kernels(model) -> None:
    """Redo two steps of the first load that vLLM's CPU backend leaves out of a reload (seen in 0.30).

    Without them it returns no error and a broken model: expert weights stay in the checkpoint's layout
    although the kernel reads a packed one, and a tied head keeps the packed copy of the old embedding.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(module, "w13_weight"):
            kernel.fused_experts.process_weights_after_loading(module)
    if model.config.tie_word_embeddings:
        dispatch_cpu_unquantized_gemm(model.lm_head, remove_weight=False)

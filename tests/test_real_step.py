"""experiments.bench.real_step: the bound of an update and the ratios of a table."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

import moe_model
from experiments.bench import real_step

SIZES = {
    "vocab_size": 98, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES, tie_word_embeddings=True),
        MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=True),
    ],
)
def test_the_flop_of_an_update_are_those_that_torch_counts_in_transformers(config):
    config._attn_implementation = "sdpa"  # products of attention are an operator of its own, not counted here
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    ids = torch.arange(40).reshape(2, 20)

    def logits(num_predicted: int) -> torch.Tensor:
        return model(ids, logits_to_keep=num_predicted, use_cache=False).logits

    def counted(run) -> int:
        with FlopCounterMode(display=False) as counter:
            run()
        counts = counter.get_flop_counts()["Global"]
        return sum(count for operator, count in counts.items() if "mm" in str(operator))

    products = counted(lambda: logits(7).sum().backward()) + counted(torch.no_grad()(lambda: logits(5)))
    tokens = {"computed": 40, "predicted": 2 * 7, "forward_computed": 40, "forward_predicted": 2 * 5}
    assert real_step.product_flop(config, tokens) == products
    model.requires_grad_(False)  # as with adapters
    embedded = model.get_input_embeddings()(ids).requires_grad_()
    products = counted(lambda: model(inputs_embeds=embedded, use_cache=False).logits.sum().backward())
    assert real_step.product_flop(config, {"computed": 40, "predicted": 40}, products=2) == products


def test_ratios_of_a_real_step_are_taken_within_a_round():
    def steps(step: float, update: float, flop: float, rate: float) -> list[dict]:
        warm_up = {"step": 99.0, "tokens": 1.0, "update": 99.0, "flop": 1.0, "busiest_rank": 1.0}
        measured = {"step": step, "tokens": 60.0, "update": update, "flop": flop, "busiest_rank": 1.25}
        rates = [{"products": share * rate, "decoding": 2 * rate} for share in (0.5, 1.5)]
        measured |= {"rollout": 3.0, "decode_flop": flop, "ranks": [{"rates": each} for each in rates]}
        return [warm_up, measured]

    def one_round(slowness: float, rate: float) -> dict:
        runs = {
            "dense": steps(10 * slowness, 5.0, 40.0, rate),  # a bound of 40 / (2 x rate)
            "moe": steps(20 * slowness, 12.0, 80.0, rate),
            "moe_lora": steps(15 * slowness, 9.0, 80.0, rate),
            "trl": [{"step": 1.0, "tokens": 1.0}, {"step": 40 * slowness, "tokens": 120.0}],
            "trl_bf16": [{"step": 1.0, "tokens": 1.0}, {"step": 30 * slowness, "tokens": 120.0}],
        }
        for trainer, gib in (("moe", 14.0 * slowness), ("moe_lora", 7.0)):
            runs[trainer][1] |= {"sync": 2.0, "peak_gib": gib}
        return {"runs": runs}

    data = {"rounds": [one_round(1.0, 5.0), one_round(2.0, 10.0)]}
    assert real_step.update_over_bound(data) == {"dense": 1.875, "moe": 2.25, "moe_lora": 1.6875}
    table = real_step.table_lines(data)
    cells = {line.split(" | ")[0].strip("| "): line.split(" | ")[1:] for line in table[2:]}
    assert cells["step of `trl` / step"][:2] == ["4.00 (4.00-4.00)", "2.00 (2.00-2.00)"]
    assert cells["step of `trl_bf16` / step"][:2] == ["3.00 (3.00-3.00)", "1.50 (1.50-1.50)"]
    assert cells["tokens/s / tokens/s of `trl`"][0] == "2.00 (2.00-2.00)"
    assert cells["update / bound"][:2] == ["1.88 (1.25-2.50)", "2.25 (1.50-3.00)"]
    assert cells["update / bound of the busiest rank"][0] == "1.50 (1.00-2.00)"
    assert cells["rollout / bound"][:2] == ["2.25 (1.50-3.00)", "1.12 (0.75-1.50)"]
    assert cells["update / update of `dense`, divided by the same ratio of FLOP"][1] == "1.20 (1.20-1.20)"
    assert cells["update / update of `moe`"][2] == "0.75 (0.75-0.75)"
    assert cells["peak memory / peak memory of `moe`"][2] == "0.38 (0.25-0.50)"


@pytest.mark.parametrize(
    "option, settings, dtypes",
    [
        ("auto", [], ("bfloat16", "float32")), ("float32", [], ("float32", "float32")),
        ("auto", ["model.dtype=float32", "rollout.dtype=bfloat16"], ("float32", "bfloat16")),
    ],
)  # fmt: skip
def test_the_record_names_the_dtypes_that_the_runs_take(option, settings, dtypes, monkeypatch):
    monkeypatch.setattr(moe_model, "fast_dtype", {512: "bfloat16", 32: "float32"}.get)
    args = SimpleNamespace(dtype=option, settings=settings, max_new_tokens=8)
    real_step.choose_dtypes(args)
    assert (args.dtype, args.engine_dtype) == dtypes

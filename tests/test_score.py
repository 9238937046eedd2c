"""data/score.py as a user starts the script, against probabilities by transformers; load_scores."""

import json
import math
import subprocess

import pytest
import torch
from conftest import ROOT

from data import random_model
from data.prompts import DataSettings, OfflineScore, Prompt, load_prompts, load_scores, prompt_sha
from data.score import (
    finished_rows,
    header_of,
    model_digest,
    open_output,
    parse_args,
    read_prompts,
    row_of,
    summary,
    weights_of,
    zero_variance_of_draws,
)
from data.stream import load_sets
from reward import Verdict
from runtime.user_files import DIGESTS
from tests import preloaded

TINY = ROOT / "data" / "built" / "tiny"
NUM_PROMPTS = 100
SAMPLES = 16
TEMPERATURE = 0.7
HEADER = {"model": "m 0", "samples": 4, "temperature": 1.0}
SHAS = [prompt_sha(Prompt(f"{i}=", "1", "exact", "set")) for i in range(3)]


def row(sha, pass_rate=0.5, mean_tokens=3.0, wrong_rate=None):
    if wrong_rate is None and isinstance(pass_rate, float | int):
        wrong_rate = 1 - pass_rate
    rates = {"pass_rate": pass_rate, "wrong_rate": wrong_rate}
    return {"prompt_sha": sha, **rates, "num_samples": 4, "mean_tokens": mean_tokens}


def write(path, rows, tail=""):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return path


# ---- a real run --------------------------------------------------------------------------------------------
def command(prompts, output, *options):
    return [
        "--model", TINY / "model", "--prompts", prompts, "--output", output, "--max-new-tokens", 16,
        "--temperature", TEMPERATURE, "--dtype", "float32", "--kv-cache-gib", 0.25, *options,
    ]  # fmt: skip


def score(*arguments) -> subprocess.CompletedProcess:
    """Run data.score as one process without torchrun."""
    return preloaded.run(0, "-m", "data.score", *arguments)


@pytest.fixture(scope="module")
def prompts_file(demo_model, tmp_path_factory):
    """Write additions, the first addition again, and a prompt whose reference answer is no number."""
    rows = [json.loads(line) for line in (TINY / "test.jsonl").read_text().splitlines()[:NUM_PROMPTS]]
    broken = {"prompt": "1    +2    =", "answer": "three", "kind": "numeric", "difficulty": 1}
    return write(tmp_path_factory.mktemp("score") / "prompts.jsonl", [*rows, rows[0], broken])


@pytest.fixture(scope="module")
def scored(prompts_file):
    """Score with one rank in chunks of 70 prompts; return the file and the printed text."""
    output = prompts_file.with_name("scores.jsonl")
    done = score(*command(prompts_file, output, "--chunk", 70))
    assert done.returncode == 0, done.stderr[-3000:]
    return output, done.stdout


def solve_probabilities(prompts: list[Prompt]) -> torch.Tensor:
    """Compute P(completion = answer + end of sequence) of each prompt by transformers, teacher-forced."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(TINY / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(TINY / "model")
    probabilities = []
    for prompt in prompts:
        start, answer = (tokenizer(text)["input_ids"] for text in (prompt.text, prompt.answer))
        answer = answer + [tokenizer.eos_token_id]
        with torch.no_grad():
            logits = model(torch.tensor([start + answer])).logits[0, len(start) - 1 : -1]
        logp = (logits.double() / TEMPERATURE).log_softmax(-1)
        probabilities.append(logp.gather(1, torch.tensor(answer).unsqueeze(1)).sum().exp())
    return torch.stack(probabilities)


@pytest.mark.slow
def test_pass_rates_agree_with_probabilities_by_transformers(scored, prompts_file):
    """n = 1600 completions: their sum within 4 standard deviations, and chi-square prompt by prompt."""
    prompts = load_prompts(prompts_file)[:NUM_PROMPTS]
    scores = load_scores(scored[0])
    solved = torch.tensor([scores[prompt_sha(prompt)].pass_rate for prompt in prompts]).double() * SAMPLES
    p = solve_probabilities(prompts)
    expected = SAMPLES * p
    variance = SAMPLES * p * (1 - p)
    assert abs(solved.sum() - expected.sum()) < 4 * variance.sum().sqrt()
    spread = variance > 0.5  # a smaller variance is too skewed for chi-square
    squares = ((solved - expected) ** 2 / variance)[spread]
    assert spread.sum() > 30 and abs(squares.sum() - len(squares)) < 4 * (2 * len(squares)) ** 0.5
    assert (solved[p < 1e-4] == 0).all() and (solved[p > 1 - 1e-4] == SAMPLES).all()
    wrong_pairs = ((solved.roll(1) - expected) ** 2 / variance)[spread]
    assert abs(wrong_pairs.sum() - len(squares)) > 4 * (2 * len(squares)) ** 0.5


@pytest.mark.slow
def test_file_and_summary(scored, prompts_file):
    path, printed = scored
    header, *rows = map(json.loads, path.read_text().splitlines())
    model = f"model {model_digest(TINY / 'model')}"
    assert header == {
        "model": model, "samples": SAMPLES, "temperature": TEMPERATURE, "max_new_tokens": 16, "seed": 0,
        "dtype": "float32", "kinds": ["exact", "numeric"], "stop": [],
        "reward": {"timeout_s": 10.0, "memory_gib": 2.0, "sandbox": "bubblewrap", "code_timeout_s": 3.0,
                   "code_memory_gib": 1.0},
    }  # fmt: skip
    prompts = load_prompts(prompts_file)
    assert [r["prompt_sha"] for r in rows] == list(dict.fromkeys(map(prompt_sha, prompts)))
    assert all(r["num_samples"] == SAMPLES for r in rows[:-1])
    assert rows[-1] | {"prompt_sha": ""} == row("", None) | {
        "num_samples": 0, "mean_tokens": rows[-1]["mean_tokens"]
    }, "a failed verdict counts as no sample"  # fmt: skip
    lengths = sum(r["mean_tokens"] for r in rows[:-1]) / NUM_PROMPTS
    digits = sum(prompt.difficulty for prompt in prompts[:NUM_PROMPTS]) / NUM_PROMPTS
    assert abs(lengths - (digits + 2)) < 0.1  # one digit more than the operands, and the end of the sequence
    assert f"pass rates of {NUM_PROMPTS} prompts; 1 more" in printed
    assert printed.rstrip().endswith(summary(rows))


@pytest.mark.slow
def test_two_ranks_resume_after_a_truncated_line_and_write_the_same_file(scored, prompts_file, tmp_path):
    complete = scored[0].read_bytes()
    lines = complete.splitlines(keepends=True)
    resumed = tmp_path / "scores.jsonl"
    resumed.write_bytes(b"".join(lines[:8]) + lines[8][:50])
    done = preloaded.run(2, "-m", "data.score", *command(prompts_file, resumed, "--chunk", 31))
    assert done.returncode == 0, done.stderr[-3000:]
    assert resumed.read_bytes() == complete and "7 of 101 prompts done" in done.stderr
    summaries = [text.split("\n", 1)[1] for text in (done.stdout, scored[1])]
    assert summaries[0] == summaries[1], "the summary covers all rows of the file"


@pytest.mark.slow
def test_a_finished_file_and_another_seed_need_no_engine(scored, prompts_file):
    again = score(*command(prompts_file, scored[0]))
    assert again.returncode == 0 and again.stdout == scored[1] and "starting vLLM" not in again.stderr
    content = scored[0].read_bytes()
    refused = score(*command(prompts_file, scored[0], "--seed", 1, "--samples", 8))
    assert refused.returncode == 2 and "samples 16" in refused.stderr and "seed 0" in refused.stderr
    assert "Traceback" not in refused.stderr and scored[0].read_bytes() == content


# ---- resuming ----------------------------------------------------------------------------------------------
def test_finished_rows_takes_whole_lines_only(tmp_path):
    path = tmp_path / "scores.jsonl"
    rows = [row(sha) for sha in SHAS]
    assert finished_rows(path, HEADER, SHAS) == ([], 0)
    for content in ("", json.dumps(HEADER)[:20], json.dumps(HEADER), json.dumps(HEADER) + "\n"):
        path.write_text(content)
        assert finished_rows(path, HEADER, SHAS) == ([], 0)
    write(path, [HEADER | {"samples": 9}])
    assert finished_rows(path, HEADER, SHAS) == ([], 0)  # the file has no row that could be lost
    size = write(path, [HEADER, *rows[:2]]).stat().st_size
    for tail in ("", "{", json.dumps(rows[2])):
        assert finished_rows(write(path, [HEADER, *rows[:2]], tail), HEADER, SHAS) == (rows[:2], size)
    assert finished_rows(write(path, [HEADER, *rows]), HEADER, SHAS)[0] == rows


@pytest.mark.parametrize(
    "rows, tail, message",
    [
        ([HEADER | {"model": "m 1"}, row(SHAS[0])], "", "model 'm 1'"),
        ([HEADER | {"temperature": 0.5}, row(SHAS[0])], "", "temperature 0.5"),
        ([HEADER, row(SHAS[0]), row(SHAS[2])], "", "row 3"),
        ([HEADER, *map(row, SHAS), row(SHAS[0])], "", "row 5"),
        ([{"prompt": "1=", "answer": "1"}], "", "scores.jsonl"),
        ([["a list"]], "", "scores.jsonl"),
        ([HEADER], "{\n" + json.dumps(row(SHAS[1])) + "\n", "line 2"),
    ],
)
def test_a_file_of_another_command_is_refused_and_unchanged(rows, tail, message, tmp_path):
    path = write(tmp_path / "scores.jsonl", rows, tail)
    content = path.read_bytes()
    with pytest.raises(ValueError, match=message):
        open_output(path, HEADER, SHAS)
    assert path.read_bytes() == content


def test_a_second_writer_is_refused(tmp_path):
    rows, file = open_output(tmp_path / "new" / "scores.jsonl", HEADER, SHAS)
    assert rows == []
    with file, pytest.raises(ValueError, match="another process"):
        open_output(tmp_path / "new" / "scores.jsonl", HEADER, SHAS)


# ---- functions ---------------------------------------------------------------------------------------------
def test_failed_verdicts_do_not_count():
    verdicts = [Verdict(1.0, "ok"), Verdict(0.0, "timeout"), Verdict(0.0, "no_answer"), Verdict(0.0, "error")]
    assert row_of("a", [1, 2, 3, 6], verdicts) == row("a", 0.5) | {"num_samples": 2}
    assert row_of("a", [1, 5], verdicts[1::2]) == row("a", None) | {"num_samples": 0}
    sums = [Verdict(0.5, "ok", parts={"math": 1.0, "rewards.py:brevity": 0.0}), Verdict(0.9, "wrong")]
    expected = row("a", 0.0, wrong_rate=0.0) | {"num_samples": 2}
    assert row_of("a", [3, 3], sums) == expected, "status ok, but a reward below 1 is not solved"


def test_summary_counts_every_rate_once_and_applies_the_formula():
    rates = [0, 0, 0.1, 0.2, 0.5, 0.8, 0.95, 1, None]
    text = summary([row(sha, rate) for sha, rate in zip("abcdefghi", rates)])
    counts = [int(line.split("%")[0].split()[-2]) for line in text.splitlines() if "%" in line]
    assert counts == [2, 1, 1, 1, 0, 2, 1] and "of 8 prompts; 1 more" in text
    expected = sum(p**8 + (1 - p) ** 8 for p in rates[:-1]) / 8
    assert f"expected at G = 8: {expected:.3f}" in text and "bias" not in text  # fewer than G samples


def test_zero_variance_of_draws_has_no_bias():
    """Compare with the exact binomial mean of 16 samples; the plug-in estimate is off by over a tenth."""
    for p in (0.1, 0.3, 0.9):
        weights = [math.comb(16, k) * p**k * (1 - p) ** (16 - k) for k in range(17)]
        drawn = [{"pass_rate": k / 16, "wrong_rate": 1 - k / 16, "num_samples": 16} for k in range(17)]
        mean = sum(w * zero_variance_of_draws(row) for w, row in zip(weights, drawn))
        assert mean == pytest.approx(p**8 + (1 - p) ** 8, rel=1e-12)
        assert sum(w * ((k / 16) ** 8 + (1 - k / 16) ** 8) for k, w in enumerate(weights)) > 1.05 * mean


def test_digest_and_weights_follow_the_folder(tmp_path):
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text("{}")
    b = torch.arange(1_000_000.0)
    save_file({"a": torch.arange(4.0)}, tmp_path / "model-1.safetensors")
    save_file({"b": b}, tmp_path / "model-2.safetensors")
    first = model_digest(tmp_path)
    assert model_digest(tmp_path) == first and {n for n, _ in weights_of(tmp_path)} == {"a", "b"}
    index = {"weight_map": {"b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    ((name, tensor),) = weights_of(tmp_path)  # the index omits the shard of an earlier save
    assert name == "b" and torch.equal(tensor, b)
    save_file({"b": b + 1}, tmp_path / "model-2.safetensors")
    second = model_digest(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert len({first, second, model_digest(tmp_path)}) == 3


@pytest.mark.slow
def test_programs_need_a_sandbox_before_anything_is_generated(prompts_file, tmp_path, monkeypatch):
    row = {"prompt": "1+1=", "kind": "code", "answer": '{"inputs": [""], "outputs": ["2"]}'}
    path = write(tmp_path / "set.jsonl", [row])
    with monkeypatch.context() as changed:
        changed.setenv("PATH", str(tmp_path))
        done = score(*command(path, tmp_path / "scores.jsonl"))
    assert done.returncode == 2 and "bubblewrap" in done.stderr
    assert "reward.sandbox=rlimits" in done.stderr
    done = score(*command(path, tmp_path / "scores.jsonl", "--samples", 1), "reward.sandbox=rlimits")
    assert done.returncode == 0 and "pass rates of 1 prompts; 0 more without" in done.stdout


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """Make a folder with the parts of a model that reading prompts needs: a tokenizer and a context of 99."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = random_model.build_tokenizer(["many clips"], 300)
    tokenizer.save_pretrained(folder)
    config = {"model_type": "qwen3_moe", "max_position_embeddings": 99}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    return folder, tokenizer


def options_for(folder, prompts, *options):
    options = map(str, ("--max-new-tokens", 24, *options))
    return parse_args(["--model", str(folder), "--prompts", str(prompts), "--output", "s.jsonl", *options])


def test_prompts_are_read_and_rendered_as_in_training(chat_model, tmp_path):
    folder, tokenizer = chat_model
    rows = [
        {"q": [{"role": "user", "content": "many"}], "info": {"gold": "1"}, "level": 2},
        {"q": [{"role": "user", "content": "many"}], "info": {"gold": "1"}, "level": 2},
        {"q": [{"role": "user", "content": "clips " * 50}], "info": {"gold": "1"}, "level": 2},
        {"q": [{"role": "user", "content": "easy"}], "info": {"gold": "1"}, "level": 1},
        {"q": [], "info": {"gold": "2"}, "level": 3},
        {"q": "no messages", "info": {"gold": "2"}, "level": 3},
        {"q": "beyond the limit", "info": {"gold": "2"}, "level": 3},
    ]
    path = write(tmp_path / "set.jsonl", rows)
    options = [
        "--columns", "prompt=q", "answer=info.gold", "difficulty=level", "--difficulty", 2, 3, "--limit", 4,
        "--chat", "always", "--system-prompt", "S", "--chat-template-args", "{enable_thinking: false}",
        "--on-bad-row", "drop", "--kind", "numeric", "--template", "<{prompt}>",
    ]  # fmt: skip
    prompts, prompt_ids, _, notes = read_prompts(options_for(folder, path, *options))
    conversations = [
        [{"role": "system", "content": "S"}, {"role": "user", "content": content}]
        for content in ("<many>", "<no messages>")
    ]
    arguments = {"add_generation_prompt": True, "enable_thinking": False}
    rendered = [tokenizer.apply_chat_template(messages, **arguments) for messages in conversations]
    assert prompt_ids == [list(batch["input_ids"]) for batch in rendered]
    assert [(p.answer, p.kind, p.messages) for p in prompts] == [
        ("1", "numeric", conversations[0]), ("2", "numeric", conversations[1])
    ]  # fmt: skip
    assert options_for(folder, path, "--special-tokens").data.special_tokens
    assert "2 rows dropped" in notes[1] and "context of 99" in notes[1] and "--max-new-tokens 75" in notes[1]
    settings = DataSettings(
        train=[{"path": str(path), "columns": {"prompt": "q", "answer": "info.gold", "difficulty": "level"},
                "difficulty": (2, 3), "limit": 4, "template": "<{prompt}>", "kind": "numeric"}],
        chat="always", system_prompt="S", chat_template_args={"enable_thinking": False}, on_bad_row="drop",
    )  # fmt: skip
    trained = load_sets(settings, tokenizer, 75, []).train
    assert {prompt_sha(p) for p in trained} == {prompt_sha(p) for p in prompts}, "the keys of load_scores()"


def test_the_header_tells_two_versions_of_a_function_apart(chat_model, tmp_path):
    args = options_for(chat_model[0], tmp_path / "set.jsonl")
    file = tmp_path / "mine.py"
    headers = []
    for text in ("a = 1", "a = 2"):
        file.write_text(text)
        DIGESTS.clear()  # a run keeps the digest of its start
        headers.append(header_of(args, ["exact", f"{file}:score"]))
    assert headers[0] != headers[1] and "functions" not in header_of(args, ["exact"])


def test_a_row_that_repeats_a_prompt_with_other_columns_is_reported(chat_model, tmp_path):
    """Scores are found by prompt and answer, so that the second row would get the score of the first."""
    rows = [{"prompt": "Be brief.", "answer": "1", "words": number} for number in (5, 5, 9)]
    path = write(tmp_path / "set.jsonl", rows)
    prompts, _, _, notes = read_prompts(options_for(chat_model[0], path, "--kind", "numeric"))
    assert len(prompts) == 1 and any("1 rows repeat" in note for note in notes)


@pytest.mark.parametrize(
    "options, message",
    [
        (["--samples", 0], "--samples 0"),
        (["--temperature", 0], "--temperature 0.*--samples 1"),
        (["--temperature", -1], "--temperature -1"),
        (["--model", "no/such/folder"], "--model no/such/folder.*config.json"),
        (["reward.sandbx=rlimits"], "reward.sandbx.*sandbox"),
        (["train.num_steps=2"], "train.*rollout.stop"),
        (["rollout.temperature=2"], "rollout.temperature.*rollout.stop"),
        (["--template", "Q: {question}"], "--template.*{prompt}"),
        (["--template", r"{prompt}\n"], "--template.*line break"),
        (["--limit", 0], "--limit.*0"),
        (["--chat-template-args", "5"], "--chat-template-args"),
        (["--chat-template-args", "{a"], "--chat-template-args"),
        (["--chat-template-args", "{a: 1, a: 2}"], "given twice"),
        (["--chat", "never", "--system-prompt", "s"], "data.chat"),
    ],
)
def test_bad_options(chat_model, options, message):
    with pytest.raises(ValueError, match=message):
        options_for(chat_model[0], "set.jsonl", *options)


def test_a_row_may_name_only_functions_that_the_command_names(chat_model, tmp_path):
    rows = [{"prompt": f"q {kind}", "answer": "1", "kind": kind} for kind in ("exact", "timeit:timeit")]
    path = write(tmp_path / "prompts.jsonl", rows)
    with pytest.raises(ValueError, match=r"prompts\.jsonl: row 2: .*'timeit:timeit'"):
        read_prompts(options_for(chat_model[0], path))
    with pytest.raises(ValueError, match="--kind.*'maths'"):
        options_for(chat_model[0], path, "--kind", "maths")
    options = options_for(chat_model[0], path, "reward.functions=[timeit:timeit]", 'rollout.stop=["x"]')
    assert [prompt.kind for prompt in read_prompts(options)[0]] == ["exact", "timeit:timeit"]
    assert options.stop == ["x"]
    path = write(tmp_path / "other.jsonl", [{"prompt": "q", "answer": "1"}])
    (prompt,), *_ = read_prompts(options_for(chat_model[0], path, "--kind", "0.5*math + 0.5*timeit:timeit"))
    assert prompt.kind == "0.5*math + 0.5*timeit:timeit"


def test_a_prompt_that_fills_the_context_is_refused_with_file_and_row(chat_model, tmp_path):
    path = write(tmp_path / "prompts.jsonl", [{"prompt": "x" * 76, "answer": "1"}])
    with pytest.raises(ValueError, match="prompts.jsonl: row 1: .*76 tokens.*99"):
        read_prompts(options_for(chat_model[0], path))


# ---- load_scores -------------------------------------------------------------------------------------------
def test_load_scores(tmp_path):
    path = write(tmp_path / "s.jsonl", [HEADER, row(SHAS[0], 0.25), row(SHAS[1], None), row(SHAS[2], 1, 7)])
    expected = {SHAS[0]: OfflineScore(0.25, 3.0, 0.75), SHAS[1]: None, SHAS[2]: OfflineScore(1, 7, 0)}
    assert load_scores(path) == expected
    assert prompt_sha(Prompt("a", "b", "exact", "s")) == prompt_sha(Prompt("a", "b", "math", "t", 3.0))
    assert prompt_sha(Prompt("1=", "12", "exact", "s")) != prompt_sha(Prompt("1=1", "2", "exact", "s"))


ROW = row(SHAS[0])
BAD_FIELDS = {  # {field: values that load_scores() refuses}
    "pass_rate": (1.5, float("nan"), "1", True),
    "wrong_rate": (0.6, "a"),
    "mean_tokens": (None, -1, float("nan"), True),
}


@pytest.mark.parametrize(
    "rows, tail, message",
    [
        *((rows, "", "row 1 .*header") for rows in ([ROW], [{"prompt": "1="}], [])),
        ([HEADER, ROW], '{"prom', "line 3 .*data.score"),
        ([HEADER, ["a list"]], "", "row 2"),
        ([HEADER, ROW, row("abc")], "", "row 3: prompt_sha.* 'abc'"),
        ([HEADER, {"pass_rate": 0.5}], "", "row 2: prompt_sha.* None"),
        ([HEADER, {"prompt_sha": SHAS[0]}], "", "row 2: pass_rate"),
        ([HEADER, ROW, ROW], "", "row 3: prompt"),
        *(
            ([HEADER, ROW | {field: value}], "", f"row 2: {field}.* {value!r}")
            for field, values in BAD_FIELDS.items()
            for value in values
        ),
    ],
)
def test_load_scores_names_file_and_row(rows, tail, message, tmp_path):
    path = write(tmp_path / "s.jsonl", rows, tail)
    with pytest.raises(ValueError, match=message) as error:
        load_scores(path)
    assert str(path) in str(error.value)

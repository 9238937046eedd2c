"""Start runs with hostile input: reward functions, rows, files, models and settings (see faults.py)."""

import json
import math
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

from experiments.bench.common import ROOT
from tests.campaign.verdicts import (
    DAMAGE,
    LEFT_S,
    REFUSAL_S,
    RUN_S,
    TINY,
    Attempt,
    Bench,
    Failed,
    cut,
    end_of,
    must_equal,
    refusal,
    rows_of,
    tagged,
)

# ------------------------------------------------------------------------------------------------------------
# Reward functions
# ------------------------------------------------------------------------------------------------------------
HOSTILE = """
import asyncio, json, os, signal, sys, time

def raises(completion, answer): raise KeyError("no such test\\x1b[31m")
def gives_nan(completion, answer): return float("nan")
def gives_none(completion, answer): return None
def gives_2(completion, answer): return 2
def gives_text(completion, answer): return "1"
def leaves(completion, answer): sys.exit(0)
def exits(completion, answer): os._exit(0)
def aborts(completion, answer): os.abort()
def recurses(completion, answer): return recurses(completion, answer)
def eats(completion, answer): return bytearray(1 << 40)
def blocks(completion, answer): time.sleep(1000)
def hangs(completion, answer):
    while True: pass
def ignores_alarm(completion, answer):
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    while True: time.sleep(1)
def masks_alarm(completion, answer):
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True: time.sleep(1)
async def blocks_the_loop(completion, answer): time.sleep(1000)
async def waits_for_ever(completion, answer):
    while True:
        try: await asyncio.sleep(1000)
        except asyncio.CancelledError: pass
def closes(completion, answer):
    os.closerange(0, 256)
    return 0.5
def leaves_children(completion, answer):
    for _ in range(20):
        if os.fork() == 0:
            time.sleep(1000); os._exit(0)
    return 0.5
def dies_with_children(completion, answer):
    leaves_children(completion, answer); os.abort()
def flees(completion, answer):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            open(__file__ + "_fled", "w"); time.sleep(1000)
        os._exit(0)
    os.wait(); return 0.5
def floods(completion, answer):
    for _ in range(50): os.write(1, b"x" * (1 << 20)); os.write(2, b"z" * (1 << 20)); print("y" * 1000)
    return 0.5
def write_everywhere(text):
    for fd in range(3, 256):
        try: os.write(fd, text)
        except OSError: pass
def writes_garbage(completion, answer): write_everywhere(b"garbage }\\n"); return 0.5
def writes_half(completion, answer): write_everywhere(b"[half a line"); return 0.5
def writes_much(completion, answer): write_everywhere(b"x" * (1 << 21)); return 0.5
def forges(completion, answer):
    write_everywhere(json.dumps(["0" * 16, 1.0, "ok", "", {}, 0.1]).encode() + b"\\n"); return 0.5
def forges_shape(completion, answer): write_everywhere(b'["0", {"fields": 3}]\\n[]\\n7\\n'); return 0.5
"""
FUNCTIONS = re.findall(r"def (\w+)\(completion, answer\)", HOSTILE)
STATUSES = {  # name: accepted statuses of the function's items, unless "error"
    **dict.fromkeys(("blocks", "hangs", "ignores_alarm", "masks_alarm", "blocks_the_loop"), ("timeout",)),
    "waits_for_ever": ("timeout",),
    **dict.fromkeys(("leaves_children", "flees", "floods"), ("wrong",)),
    **dict.fromkeys(("closes", "writes_garbage", "writes_half", "writes_much", "forges", "forges_shape"),
                    ("wrong", "error")),
}  # fmt: skip
IN_A_RUN = ("raises", "gives_nan", "leaves", "exits", "aborts", "hangs", "recurses")
NO_SCORES = ("gives_none", "gives_2", "gives_text")  # results that no completion excuses


def hostile_function(name: str, bench: Bench, folder: Path) -> tuple[str, str]:
    """Score items with a hostile function between rules, and run the check that precedes a run."""
    import reward
    import workers
    from settings import RewardSettings

    (folder / "hostile.py").write_text(HOSTILE)
    kind = f"{folder / 'hostile.py'}:{name}"
    start = time.monotonic()
    message = ""
    rules = {("exact", "a", "a"): 1.0, ("exact", "b", "a"): 0.0, ("characters", "ab", "ac"): 0.5}
    tag = {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    with mock.patch.object(workers, "GRACE_S", 1.0), mock.patch.dict(os.environ, tag):
        with reward.RewardPool(2, timeout_s=1.0, memory_bytes=1 << 30) as pool:
            for i in range(3):
                for item in rules:
                    pool.submit((i, *item), *item)
                pool.submit(i, kind, "x", "a", {})
            verdicts = pool.collect()
        try:
            reward.check_functions([kind], [(kind, "a", {})], RewardSettings(timeout_s=1.0))
        except ValueError as error:
            message = str(error)
    statuses = {verdicts.pop(i).status for i in range(3)}
    if any(verdict.reward != rules[key[1:]] for key, verdict in verdicts.items()):
        raise Failed("a rule has a wrong verdict beside the function")
    if not statuses <= set(STATUSES.get(name, ("error",))):
        raise Failed(f"the verdicts of the function are {sorted(statuses)}")
    if "wrong" not in statuses and f":{name}:" not in message:
        raise Failed(f"the check before a run says {message!r}")
    ended = time.monotonic()
    while processes := tagged(str(folder)):
        if time.monotonic() - ended > LEFT_S:
            raise Failed(f"{len(processes)} processes are still alive after {LEFT_S:g} s")
    if time.monotonic() - start > RUN_S:
        raise Failed(f"it took {time.monotonic() - start:.0f} s")
    return "same", f"{', '.join(sorted(statuses))}; before a run: {message[:300] or 'accepted'}"


def no_score(name: str, bench: Bench, folder: Path) -> tuple[str, str]:
    """Score an item with a function whose result is no score, which ends a run at the first."""
    import reward

    (folder / "hostile.py").write_text(HOSTILE)
    try:
        with reward.RewardPool(1) as pool:
            pool.submit(0, f"{folder / 'hostile.py'}:{name}", "x", "a", {})
            pool.collect()
    except RuntimeError as error:
        if f":{name} returned" in str(error):
            return "refused", str(error)[:300]
        raise
    raise Failed("the result counts as a verdict")


def fleeing_rows(folder: Path) -> tuple[Path, list[str]]:
    """Return a file that appears once a process has fled from a reward function, and settings of a run."""
    (functions := folder / "hostile.py").write_text(HOSTILE)
    lines = (TINY.parent / "train.jsonl").read_text().splitlines()[:48]
    rows = [json.loads(line) | {"kind": f"{functions}:flees"} for line in lines]
    (file := folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [f"data.train=[{{path: {file}}}]", f"reward.functions={json.dumps([rows[0]['kind']])}"]
    return folder / "hostile.py_fled", settings


def hostile_run(bench: Bench, folder: Path) -> tuple[str, str]:
    """Train with a hostile function on every second row, and again with functions that only raise."""
    right = "    return lambda completion, answer: completion == answer or function(completion, answer)\n"
    text = [HOSTILE, "def unless_right(function):\n" + right]
    text += [f"in_run_{name} = unless_right({name})\n" for name in IN_A_RUN]
    (folder / "hostile.py").write_text("".join(text))
    lines = (TINY.parent / "train.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines[:48]]  # all of these rows are sampled
    for run, names in {"all": IN_A_RUN, "one": IN_A_RUN[:1]}.items():
        functions = [f"{folder / 'hostile.py'}:in_run_{name}" for name in names]
        for i, row in enumerate(rows[::2]):
            row["kind"] = functions[i % len(functions)]
        (folder / f"{run}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        done = bench.run(
            f"data.train=[{{path: {folder / run}.jsonl}}]", f"reward.functions={json.dumps(functions)}",
            "reward.max_failed_frac=1", "reward.timeout_s=1", "data.eval=[]", "checkpoint.every=0",
            f"run.dir={folder / run}",
        )  # fmt: skip
        if done.returncode:
            raise Failed(f"exit code {done.returncode}: {end_of(done.stderr)}")
    must_equal(folder / "all", folder / "one", ("verdict/", "reward_worker_restarts", "length_"))
    for status in ("error", "timeout"):
        if not any(row.get(f"verdict/{status}_frac") for row in rows_of(folder / "all")):
            raise Failed(f"no verdict has the status {status}")
    return "same", "weights and rewards equal a run in which all functions only raise"


def reward_cases() -> dict[str, Attempt]:
    """Return a case for every function, and a run with many of the functions."""
    cases = {name: partial(no_score if name in NO_SCORES else hostile_function, name) for name in FUNCTIONS}
    return cases | {"a run with them": hostile_run}


# ------------------------------------------------------------------------------------------------------------
# Data and models
# ------------------------------------------------------------------------------------------------------------
ROWS = {  # the third row of a prompt file
    "answer 1e400": '{"prompt": "1+1=", "answer": 1e400}',
    "answer NaN": '{"prompt": "1+1=", "answer": NaN}',
    "answer true": '{"prompt": "1+1=", "answer": true}',
    "answer null": '{"prompt": "1+1=", "answer": null}',
    "answer a mapping": '{"prompt": "1+1=", "answer": {"a": 1}}',
    "no answer": '{"prompt": "1+1="}',
    "empty prompt": '{"prompt": "", "answer": "2"}',
    "prompt true": '{"prompt": true, "answer": "2"}',
    "prompt a list of numbers": '{"prompt": [1, 2], "answer": "2"}',
    "doubled key": '{"prompt": "1+1=", "prompt": "2+2=", "answer": "2"}',
    "5,000 digits": f'{{"prompt": "1+1=", "answer": {"9" * 5000}}}',
    "100,000 brackets": '{"prompt": "1+1=", "answer": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "surrogate in a prompt": r'{"prompt": "1+\ud800=", "answer": "2"}',
    "surrogate in a message": r'{"prompt": [{"role": "user", "content": "\ud800"}], "answer": "2"}',
    "surrogate in an answer": r'{"prompt": "1+1=", "answer": "\ud800"}',
    "code as kind": """{"prompt": "1+1=", "answer": "open('TRACE', 'w')", "kind": "timeit:timeit"}""",
    "unknown kind": '{"prompt": "1+1=", "answer": "2", "kind": "exakt"}',
    "2 MB prompt": f'{{"prompt": "{"1+" * 1_000_000}", "answer": "2"}}',
    "a list": "[1, 2]", "cut": '{"prompt": "1+1=", "ans', "no JSON": "prompt: 1+1=", "NUL bytes": "\0" * 100,
}  # fmt: skip
FILES = {  # name: (file ending, content of the prompt file)
    "empty": (".jsonl", b""), "blank lines": (".jsonl", b"\n\n\n"), "a brace": (".jsonl", b"{"),
    "no UTF-8": (".jsonl", b'{"prompt": "\xff", "answer": "2"}\n'), "zip": (".jsonl", b"PK\x03\x04" * 99),
    "no parquet": (".parquet", b"PAR1 and nothing"), "cut gz": (".jsonl.gz", b"\x1f\x8b\x08\x00\x00"),
    "empty CSV": (".csv", b""), "CSV of zeros": (".csv", bytes(1000)), "a number": (".json", b"7"),
    "nested list": (".json", b"[" * 100_000),
}  # fmt: skip


def refuse_data(file: Path, place: str, bench: Bench) -> tuple[str, str]:
    """Train on a file; raise Failed unless a line soon refuses the file, naming file and place."""
    settings = (f"data.train=[{{path: {file}}}]", "model.ep_size=1", f"run.dir={file.parent / 'run'}")
    line = bench.must_refuse(str(file), *settings, ranks=1, timeout_s=REFUSAL_S)
    if not re.search(place, line):
        raise Failed(f"the line does not name the place: {line}")
    return "refused", line


def bad_row(row: str, bench: Bench, folder: Path) -> tuple[str, str]:
    """Train on a file whose third row is bad."""
    good = (TINY.parent / "train.jsonl").read_text().splitlines()[:8]
    bad = row.replace("TRACE", str(folder / "trace"))
    if "kind" not in row:
        bad = bad.replace('{"prompt"', '{"kind": "exact", "prompt"', 1)
    (file := folder / "rows.jsonl").write_text("\n".join([*good[:2], bad, *good[2:]]) + "\n")
    result = refuse_data(file, r"(row|line) 3\b", bench)
    if (folder / "trace").exists():
        raise Failed("code in a row was executed")
    return result


def bad_file(ending: str, content: bytes, bench: Bench, folder: Path) -> tuple[str, str]:
    """Train on a file with this content."""
    (file := folder / f"rows{ending}").write_bytes(content)
    return refuse_data(file, "", bench)


def edit_json(**changes: object) -> Callable[[Path], None]:
    """Return a function that changes values of a JSON file."""
    return lambda file: file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_weights(change: Callable) -> Callable[[Path], None]:
    """Return a function that changes the tensors {name: tensor} of a safetensors file."""

    def edit(file: Path) -> None:
        from safetensors.torch import load_file, save_file

        save_file(change(load_file(file)), file, {"format": "pt"})

    return edit


def with_code(file: Path) -> None:
    """Make config.json refer to code in the model's folder, with a model type that only this code defines."""
    (file.parent / "own.py").write_text(f"open({str(file.parent / 'trace')!r}, 'w')\n")
    names = {name: "own.Own" for name in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")}
    edit_json(auto_map=names, model_type="own")(file)


def with_fewer_tokens(file: Path) -> None:
    """Remove the tokenizer's last tokens from config.json and from the weights."""

    def first_rows(tensors: dict) -> dict:
        is_cut = {name: "embed_tokens" in name or "lm_head" in name for name in tensors}
        return {name: tensor[: 16 if is_cut[name] else None].clone() for name, tensor in tensors.items()}

    edit_json(vocab_size=16)(file)
    edit_weights(first_rows)(file.with_name(WEIGHTS))


def without_tokenizer(file: Path) -> None:
    """Remove all files of the tokenizer."""
    for path in file.parent.glob("tokenizer*"):
        path.unlink()


WEIGHTS = "model-00001-of-00001.safetensors"
ROUTER = "model.layers.0.mlp.gate.weight"
MODELS = {  # name: (file, edit, text that the refusal must contain)
    "no config": ("config.json", Path.unlink, "config.json"),
    "cut config": ("config.json", cut, "config.json"),
    "config a list": ("config.json", lambda file: file.write_text("[]"), "config.json"),
    "config of another kind": ("config.json", edit_json(model_type="llama"), "llama"),
    "wrong shapes": ("config.json", edit_json(hidden_size=64), "embed_tokens"),
    "vocabulary below the tokenizer's": ("config.json", with_fewer_tokens, "vocab_size"),
    "code": ("config.json", with_code, "contains custom code"),
    "no tokenizer.json": ("tokenizer.json", Path.unlink, "tokenizer"),
    "no tokenizer": ("tokenizer.json", without_tokenizer, "holds no tokenizer"),
    "cut tokenizer": ("tokenizer.json", cut, "tokenizer"),
    "no weights": (WEIGHTS, Path.unlink, "safetensors"),
    "cut weights": (WEIGHTS, cut, WEIGHTS),
    "empty weights": (WEIGHTS, DAMAGE["emptied"], WEIGHTS),
    "a weight less": (
        WEIGHTS, edit_weights(lambda all: {n: t for n, t in all.items() if n != ROUTER}), ROUTER),
    "a weight of NaN": (WEIGHTS, edit_weights(lambda all: all | {ROUTER: all[ROUTER] * math.nan}), ROUTER),
}  # fmt: skip


def bad_model(
    name: str, edit: Callable[[Path], None], named: str, bench: Bench, folder: Path
) -> tuple[str, str]:
    """Train a damaged copy of the model."""
    model = shutil.copytree(TINY, folder / "model")
    edit(model / name)
    settings = (f"model.path={model}", f"run.dir={folder / 'run'}", "train.num_steps=1", "data.eval=[]")
    line = bench.must_refuse(named, *settings, folder=folder)
    if (model / "trace").exists():
        raise Failed("code of the model's folder was executed")
    return "refused", line


def mended_data(bench: Bench, folder: Path) -> tuple[str, str]:
    """Refuse first the data and then the model, then start in the same folder with valid input."""
    (file := folder / "rows.jsonl").write_text("{")
    refuse_data(file, "", bench)
    bench.must_refuse("nowhere", "model.path=nowhere", f"run.dir={folder / 'run'}", timeout_s=REFUSAL_S)
    bench.must_be_same(folder / "run")
    return "same", "a start in the same folder with valid data and model"


def data_cases() -> dict[str, Attempt]:
    """Return cases of rows, files and models, and a start after two refusals."""
    cases = {name: partial(bad_row, row) for name, row in ROWS.items()}
    cases |= {f"file, {name}": partial(bad_file, *file) for name, file in FILES.items()}
    cases |= {f"model, {name}": partial(bad_model, *damage) for name, damage in MODELS.items()}
    return cases | {"mended": mended_data}


# ------------------------------------------------------------------------------------------------------------
# Settings
# ------------------------------------------------------------------------------------------------------------
def numbers_outside(info) -> list[str]:
    """List values just and far outside of a numeric setting's bounds, as YAML."""
    values = []
    is_integer = "float" not in str(info.annotation)
    for bound in info.metadata:
        for name, sign in (("ge", -1), ("gt", -1), ("le", 1), ("lt", 1)):
            limit = getattr(bound, name, None)
            if isinstance(limit, (int, float)):
                next_one = limit + sign if is_integer else math.nextafter(limit, sign * math.inf)
                values += [repr(limit) if name in ("gt", "lt") else repr(next_one), str(sign * 10**30)]
    return values


UNREADABLE = ("!!python/object/apply:os.getcwd []", "9" * 5000)  # not plain YAML values


def values_outside(info) -> list[str]:
    """List invalid values of a setting, as YAML."""
    kinds = str(info.annotation)
    values = [".inf", "-.inf", ".nan", "1.0e+400", *UNREADABLE]
    if "dict" not in kinds:
        values += ["{a: 1}"]
    if "int" in kinds or "float" in kinds:
        values += numbers_outside(info) + ["true", "many", "''"]
    if "list" not in kinds and "tuple" not in kinds:
        values += ["[1]"]
    if "Literal" in kinds:
        values += ["nonsense", "7.5"]
    return values + (["maybe", "2"] if kinds == "<class 'bool'>" else [])


def must_refuse_settings(argv: list[str], *names: str) -> None:
    """Raise Failed unless these arguments are refused soon, in a line that contains all names."""
    from configure import load_config

    def stop(*_: object) -> None:
        raise Failed(f"{' '.join(argv)[:200]}: no answer after {REFUSAL_S:g} s")

    handler = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, REFUSAL_S)
    try:
        load_config(argv)
    except ValueError as error:
        line = str(error)
        if (missing := [name for name in names if name not in line]) or len(line) > 5000:
            raise Failed(f"{' '.join(argv)[:200]}: does not name {missing}: {line[:300]!r}") from error
    except (Exception, SystemExit) as error:
        raise Failed(f"{' '.join(argv)[:200]}: {type(error).__name__}: {str(error)[:300]}") from error
    else:
        raise Failed(f"{' '.join(argv)[:200]}: accepted")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


FRAMES = {  # text in a setting's name: a list around the setting that is otherwise valid
    "stages[].until.": "[{{name: one, until: {{{}}}}}, {{name: two}}]",
    "stages[].name": "[{{until: {{steps: 1}}, {}}}, {{name: two}}]",
    "[].path": "[{{{}}}]", "data.": "[{{path: unused, {}}}]",
}  # fmt: skip


def override(name: str, value: str) -> str:
    """Return the argument that sets a setting to this value."""
    section, _, keys = name.partition("[].")
    if not keys:
        return f"{name}={value}"
    frame = next(frame for text, frame in FRAMES.items() if text in name)
    key = keys.rpartition(".")[2]
    return f"{section}={frame.format(f'{key}: {value}')}"


def bad_setting(name: str, info, bench: Bench, folder: Path) -> tuple[str, str]:
    """Set a setting to invalid values; unreadable values are refused by the name of the enclosing list."""
    problems = []
    values = values_outside(info)
    section, _, keys = name.partition("[].")
    for value in values:
        named = (section,) if value in UNREADABLE else (section, keys)
        try:
            must_refuse_settings(["data.train=[{path: unused}]", override(name, value)], *named)
        except Failed as failed:
            problems.append(str(failed))
    if problems:
        raise Failed("; ".join(problems))
    return "refused", f"{len(values)} values"


LARGE = {  # settings of a run: text that the refusal must contain
    f"rollout.max_new_tokens={10**30}": "max_new_tokens", f"train.warmup_steps={10**30}": "warmup_steps",
    f"train.num_steps={10**30} train.max_generated_tokens=1": "num_steps",
    "train.learning_rate=1.0e+308": "train.learning_rate", "algorithm.kl_coef=1.0e+308": "loss",
    "rollout.max_num_seqs=65536": "max_num_seqs",
}  # fmt: skip


def too_large(settings: str, name: str, bench: Bench, folder: Path) -> tuple[str, str]:
    """Run two steps with a value that is far too large, and check the exported weights."""
    from safetensors.torch import load_file

    common = ("train.num_steps=2", "data.eval=[]", "model.ep_size=1", f"run.dir={folder / 'run'}")
    done = bench.run(*common, *settings.split(), ranks=1, timeout_s=2 * REFUSAL_S)
    if done.returncode:
        return "refused", refusal(done, name, folder)
    for file in (folder / "run" / "model").glob("*.safetensors"):
        if not all(tensor.isfinite().all() for tensor in load_file(file).values()):
            raise Failed("exit code 0, but the exported weights are not finite")
    return "same", "it runs, and the weights are finite"


def aliases(of_each: str, num: int, first: str) -> str:
    """Write a YAML in which each name refers several times to the previous name."""
    lines = [f"a{i}: &a{i} {of_each.replace('*', f'*a{i - 1}')}" for i in range(1, num)]
    return "\n".join([f"a0: &a0 {first}", *lines])


YAMLS = {  # name: (text of a file, text that the refusal must contain; "": the file's name)
    "aliases of aliases": (aliases("[" + ", ".join("*" * 10) + "]", 9, "[1, 1, 1, 1]"), "100,000"),
    "aliases of mappings": (aliases("{x: *, y: *}", 30, "{x: 1, y: 2}"), "values"),
    "an alias of itself": ("train: &a {betas: [*a]}", ""),
    "merge keys": ("a: &a {x: 1}\ntrain: {<<: *a, seed: 1}", "train.x"),
    "deep nesting": ("train: {betas: " + "[" * 3000 + "]" * 3000 + "}", "nested too deeply"),
    "20,000 unknown names": (
        "train:\n" + "".join(f"  k{i}: 1\n" for i in range(20_000)), "; and 19,990 more"),
    "long name": (f"train: {{{'k' * 1000}: 1}}", "unknown setting"),
    "doubled name": ("train: {seed: 1, seed: 2}", "given twice"),
    "a tag": ("train: !!python/object/apply:os.getcwd []", "tag"),
    "a key that is a list": ("? [1, 2]\n: 3", ""),
    "tabs": ("train:\n\tseed: 1", ""), "NUL": ("train: {seed: 1}\0", ""),
    "no UTF-8": ("train: {seed: \udcff}", "UTF-8"),
    "a list": ("- 1\n- 2", "expected sections"), "a number": ("7", "expected sections"),
    "a base that is itself": ("base: hostile.yaml", "leads back"),
    "a base that is a folder": ("base: .", "does not exist"),
    "two documents": ("train: {seed: 1}\n---\ntrain: {seed: 2}", ""),
}  # fmt: skip
UNKNOWN = ("nonsense", "nonsense.x", "train", "train.", ".train", "train.nonsense", "", "a" * 1000)


def bad_yaml(text: str, name: str, bench: Bench, folder: Path) -> tuple[str, str]:
    """Read settings from this text."""
    (file := folder / "hostile.yaml").write_bytes(text.encode(errors="surrogateescape"))
    must_refuse_settings(["--config", str(file)], name or file.name)
    return "refused", ""


def unknown_names(bench: Bench, folder: Path) -> tuple[str, str]:
    """Set unknown settings."""
    for name in UNKNOWN:
        must_refuse_settings(["data.train=[{path: unused}]", f"{name}=1"], name[:80])
    return "refused", f"{len(UNKNOWN)} names"


def setting_cases() -> dict[str, Attempt]:
    """Return cases of every setting, of unknown names and of files."""
    from runtime.config import setting_fields
    from settings import Config

    cases = {name: partial(bad_setting, name, info) for name, info in setting_fields(Config).items()}
    cases |= {f"YAML, {name}": partial(bad_yaml, *text) for name, text in YAMLS.items()}
    cases |= {f"run, {settings}": partial(too_large, settings, name) for settings, name in LARGE.items()}
    return cases | {"unknown names": unknown_names}

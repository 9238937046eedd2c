"""The pages for newcomers: the code blocks run as printed, and the names on the pages exist in the code."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from helpers import rows_of

import train_rl
from configure import check_config
from experiments import evaluate, plan
from experiments.bench import gpu_engine, gpu_kernels
from runtime.config import free_on_resume, setting_fields
from runtime.names_elsewhere import NAMES_ELSEWHERE, TABLE, entry_of
from tests import preloaded
from tests.patience import limit

DOCS = ROOT / "docs"
ROAD = DOCS / "data_and_rewards.md"
EIGHT_GPUS = "## The same job on eight GPUs"  # the blocks above this heading run on two CPU ranks
FROM_OTHERS = DOCS / "from_trl_or_verl.md"
GPU = DOCS / "gpu.md"
FINDINGS = DOCS / "findings.md"
SETTINGS = setting_fields(train_rl.Config)
LEAVES = {name.rsplit(".", 1)[-1] for name in SETTINGS}


def blocks_in(text: str) -> list[tuple[str, str]]:
    """List (language, text) of the fenced blocks of a text."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """List (language, text) of the fenced blocks of a page, without the blocks for eight GPUs."""
    return blocks_in(page.read_text().partition(EIGHT_GPUS)[0])


def eight_gpu_job(page: Path) -> str:
    """Return the YAML of the job for eight GPUs on a page."""
    first, heading, second = page.read_text().partition(EIGHT_GPUS)
    return next(text for language, text in blocks_in(second if heading else first) if language == "yaml")


def settings_in(text: str) -> list[str]:
    """List the quoted names that look like section.key of our settings."""
    quoted = re.findall(r"`([\w.\[\]]+)[:=`]", text)
    names = [name for name in quoted if name.split(".")[0] in train_rl.Config.model_fields and "." in name]
    return [name for name in names if not name.endswith(".py")]


# ---- your model, your data, your reward --------------------------------------------------------------------


def run_command(text: str, folder: Path) -> subprocess.CompletedProcess:
    """Run one command of a block as a reader would, except that Python starts from the preloaded server."""
    if script := re.match(r"python - <<'END'\n(.*)^END$", text, re.DOTALL | re.MULTILINE):
        (folder / "script.py").write_text(script[1])
        return preloaded.run(0, "script.py", cwd=folder)
    program, *arguments = shlex.split(text.replace("\\\n", " "))
    if program not in ("python", "torchrun"):
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        options = {"cwd": folder, "env": {**os.environ, "PATH": path}, "capture_output": True, "text": True}
        return subprocess.run(["bash", "-ec", text], timeout=limit(120), **options)
    ranks = arguments.pop(0).removeprefix("--nproc-per-node=") if program == "torchrun" else 0
    return preloaded.run(int(ranks), *arguments, cwd=folder)


def run_block(text: str, folder: Path) -> str:
    """Run the commands of a block one after another; return the standard output."""
    output = ""
    for command in re.split(r"^(?=python|torchrun|mkdir)", text, flags=re.MULTILINE)[1:]:
        done = run_command(command, folder)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        output += done.stdout
    return output


@pytest.fixture(scope="module")
def road(tmp_path_factory) -> tuple[Path, str]:
    """Run the blocks of the page in a checkout made of links; return the folder and the output."""
    folder = tmp_path_factory.mktemp("checkout")
    output = ""
    for path in ROOT.iterdir():
        if path.name not in ("mine", "runs"):
            (folder / path.name).symlink_to(path)
    for language, text in blocks_of(ROAD):
        file = re.match(r"# (mine/\S+)\n", text)
        if file:
            (folder / file[1]).write_text(text)
        elif language == "bash":
            output += run_block(text, folder)
    return folder, output


@pytest.mark.slow
def test_the_blocks_of_the_page_run_as_printed(road):
    folder, output = road
    steps = [row["step"] for row in rows_of(folder / "mine" / "run") if "score" in row]
    assert steps == [1, 2, 3, 4, 5]
    samples = map(json.loads, (folder / "mine/run/samples.jsonl").read_text().splitlines())
    assert all(sample["parts"].keys() == {"numeric", "mine/rewards.py:brevity"} for sample in samples)
    assert "resumed from mine/run/checkpoints/step_000004" in output
    for name in ("figures.json", "figures_completions.jsonl", "completions.html", "samples.html"):
        assert (folder / "mine" / name).stat().st_size > 0, name
    assert (folder / "mine/run/model/generation_config.json").stat().st_size > 0
    rows = [json.loads(line) for line in (folder / "mine/test.jsonl").read_text().splitlines()]
    assert [row["answer"] for row in rows] == [2 * number for number in range(102, 112)]
    assert "<|im_start|>user\nWhat is 2 + 2?" in output
    (expected,) = [text for language, text in blocks_of(ROAD) if language == "text"]
    printed = output.splitlines()
    assert set(expected.splitlines()) <= set(printed)
    assert any(line.startswith("a completion ends at ") and r"'\n\n'" in line for line in printed)


HOOKS = {f"algorithm.{hook}" for hook in ("gain", "advantage", "select")}


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_settings_that_a_page_names_exist(page):
    named = set(settings_in(page.read_text()))
    assert len(named) > 20 or page not in (ROAD, FROM_OTHERS)
    assert named - set(SETTINGS) - HOOKS - {"data.train[].kind"} == set()


def test_the_page_lists_settings_that_are_free_on_resume():
    (paragraph,) = re.findall(r"<!-- free on resume -->\n(.*?)\n\n", ROAD.read_text(), re.DOTALL)
    named = settings_in(paragraph)
    assert len(named) > 10 and set(named) <= free_on_resume(train_rl.Config)
    assert not {"data.train", "rollout.group_size"} & free_on_resume(train_rl.Config)


PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]


def anchors_of(page: Path) -> set[str]:
    """List the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


FOLDERS = ("data", "examples", "experiments", "kernels", "runtime", "tests", "verifiers")
ALL_PAGES = [
    *PAGES,
    *sorted(page for top in FOLDERS for page in (ROOT / top).rglob("*.md") if "built" not in page.parts),
]


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_to_existing_files_and_headings(page):
    broken = []
    for path, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
        if "://" in path:
            continue
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(f"{path}#{anchor}")
    assert not broken


def test_the_index_names_every_page():
    index = (DOCS / "README.md").read_text()
    assert not [page.name for page in DOCS.glob("[a-z]*.md") if f"]({page.name})" not in index]


# ---- findings ----------------------------------------------------------------------------------------------


def test_a_figure_of_a_finding_is_on_the_linked_page():
    rows = re.findall(r"^\| .*\]\([^)]*\.md\) \|$", FINDINGS.read_text(), re.MULTILINE)
    for row in rows:  # whose last cell links a page with the evidence
        cells = row.strip("|").split("|")
        evidence = (DOCS / re.search(r"\]\((.*)\)", cells[-1])[1]).read_text()
        figures = re.findall(r"[+-]?\d+\.\d+", " ".join(cells[:-1]))
        missing = [figure for figure in figures if figure.lstrip("+") not in evidence]
        assert not missing, f"{cells[0]}: {missing}"


def test_a_figure_of_the_findings_in_the_readme_is_on_the_page():
    section = (ROOT / "README.md").read_text().partition("## Findings")[2].partition("\n## ")[0]
    figures = re.findall(r"\d+\.\d+", section)
    assert figures and not [figure for figure in figures if figure not in FINDINGS.read_text()]


def test_the_code_in_the_readme_is_that_of_the_method():
    source = "".join((ROOT / "train_rl.py").read_text().split())
    (snippet,) = [text for kind, text in blocks_in((ROOT / "README.md").read_text()) if kind == "python"]
    assert "".join(snippet.split()) in source


# ---- from TRL or verl --------------------------------------------------------------------------------------


def table_rows() -> list[list[str]]:
    """List the rows of the table of names: [our names, names in TRL, names in verl]."""
    text = FROM_OTHERS.read_text().partition("## Names\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert all(len(row) == 4 for row in cells), "the table of names has four columns"
    return [[re.findall(r"`([\w.\[\]]+)`", cell) for cell in row[:3]] for row in cells]


def test_the_page_and_the_table_of_names_agree():
    """Rows of the page are a part of the table; a name that is a setting of ours leads to this setting."""
    for settings, *foreign in table_rows():
        for name in sum(foreign, []):
            leaf = name.rsplit(".", 1)[-1]
            ours, _ = entry_of(name) or (settings[0], "")
            assert ours == settings[0] and (leaf not in LEAVES or ours.endswith(f".{leaf}")), name


def test_foreign_names_lead_to_settings_and_are_no_settings():
    assert {ours for ours, _, _ in TABLE} - {None} <= set(SETTINGS) and len(NAMES_ELSEWHERE) >= 230
    assert len(NAMES_ELSEWHERE) == sum(len(names.split()) for _, names, _ in TABLE), "a name stands twice"
    assert not set(NAMES_ELSEWHERE) & LEAVES, "an error finds our own names by similarity"


@pytest.mark.parametrize("name, entry", NAMES_ELSEWHERE.items())
def test_an_error_names_our_setting_or_says_why_there_is_none(name, entry):
    setting, note = entry
    plain = name.removesuffix(".*")
    for written in (plain, f"train.{plain}", f"{plain}.zzz", f"algorithm.{plain}.zzz"):
        with pytest.raises(ValueError) as caught:
            train_rl.load_config([f"{written}=1"])
        message = str(caught.value)
        assert note in message and (f"did you mean {setting}?" if setting else "no counterpart") in message
        assert setting or "did you mean" not in message


@pytest.mark.parametrize("page", [ROOT / "README.md", ROAD], ids=lambda page: page.stem)
def test_the_job_of_a_page_fits_eight_gpus_of_80_gb(page):
    """The planner refuses a job that does not fit; with an explicit kv_cache_gib it would only warn."""
    config = train_rl.Config.model_validate(yaml.safe_load(eight_gpu_job(page)))
    check_config(config)
    assert config.rollout.kv_cache_gib is None and config.rollout.prompts_per_step % 8 == 0
    shape = plan.model_config(config.model.path)
    task = plan.Task(config, shape, plan.MACHINES["h100"], 8, 256, 512)
    assert task.config.model.dtype == task.config.rollout.dtype == "bfloat16"
    assert plan.why_not(task) is None


def test_the_evaluation_for_eight_gpus_repeats_the_settings_of_the_run(tmp_path, monkeypatch):
    """evaluate.py itself warns if prompts or end tokens differ from those of the training."""
    monkeypatch.chdir(tmp_path)
    config = train_rl.Config.model_validate(yaml.safe_load(eight_gpu_job(ROAD)))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    commands = ROAD.read_text().partition(EIGHT_GPUS)[2]
    (options,) = re.findall(r"experiments/evaluate\.py((?:.*\\\n)*.*)\n", commands.partition("\n## ")[0])
    args = evaluate.parse_args(shlex.split(options.replace("\\\n", " ")))
    settings = evaluate.read_settings(args, 40_960)
    assert evaluate.training_warnings(tmp_path, settings) == []


# ---- names of the code -------------------------------------------------------------------------------------
CODE_PAGES = [
    *PAGES,
    ROOT / "CONTRIBUTING.md",
    ROOT / "kernels" / "README.md",
]
OWN_PAGES = [page for page in CODE_PAGES if page not in (FROM_OTHERS, GPU)]  # these two quote libraries
SOURCES = [*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]


@cache
def words_of_the_code() -> set[str]:
    return set().union(*(re.findall(r"\w+", path.read_text()) for path in SOURCES))


@cache
def defined_names(path: Path) -> set[str]:
    """List the names that a file defines or imports: functions, classes, methods, fields and constants."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
    return names


@pytest.mark.parametrize("page", CODE_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_file_and_function_of_a_page_exist(page):
    """For example `rollout.py: RolloutEngine.sync`, or several functions of one file after the colon."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for file, names in re.findall(r"`([\w/]+\.py): ([\w., ]+)`", text):
        defined = defined_names(ROOT / file)
        for name in re.split(r"[., ]+", names):
            assert name in defined, f"{page.name}: {file} has no {name}"


@pytest.mark.parametrize("page", OWN_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_function_without_a_file_exists_somewhere(page):
    """A name such as `sample_step` is one of the code; tables of records may name tasks of other packages."""
    text = re.sub(r"```.*?```|<!-- report: module.*?\n\n", "", page.read_text(), flags=re.DOTALL)
    for code in re.findall(r"`([A-Za-z_][\w.]*)(?:\(\))?`", text):
        for name in code.split("."):
            is_function = re.fullmatch(r"[a-z]+(_[a-z0-9]+)+|([A-Z][a-z]+){2,}", name)
            assert not is_function or name in words_of_the_code(), (
                f"{page.name}: nothing in the code is called {name}"
            )


# ---- silent faults -----------------------------------------------------------------------------------------
def test_each_silent_fault_names_tests_or_pieces_that_exist():
    """Rows of docs/silent_faults.md: | id | fault | state unless tested; tests |."""
    text = (DOCS / "silent_faults.md").read_text()
    rows = re.findall(r"^\| ([A-Z-]+\.\d+b?) \| [^|]+ \| ([^|]+) \|$", text, re.MULTILINE)
    assert len({name for name, _ in rows}) == len(rows) == 158
    for name, here in rows:
        if here.startswith("GPU visit; "):
            pieces = re.findall(r"`(\w+)`", here)
            assert pieces and set(pieces) <= {*vars(gpu_engine), *vars(gpu_kernels)}, name
        assert "::" in here or here.startswith(("designed out", "absent; ")), name
    for file, test in re.findall(r"`(test_\w+\.py)::(\w+)`", text):
        assert test in defined_names(ROOT / "tests" / file), f"{file} has no {test}"

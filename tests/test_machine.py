"""Checks of a machine with a GPU: each cause is one line with its remedy, before anything is loaded."""

import contextlib
import os
import re
import stat
from types import SimpleNamespace

import pytest
import torch
from helpers import make_config
from transformers import Glm4MoeConfig, LlamaConfig, Qwen3MoeConfig

import fp8
import lifecycle
import rollout
from experiments.plan import model_config
from runtime import machine
from settings import RolloutSettings

H100 = ("NVIDIA H100", (9, 0))
OLD_DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 2024\nGCC 12.2\n"
NEW_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs)\n"


def make_program(path, text="#!/bin/sh\n"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# ---- one line per cause ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "has_avx2", "is_refused"),
    [("x86_64", False, True), ("x86_64", True, False), ("aarch64", False, False)],
)
def test_a_processor_without_kernels_is_refused_before_anything_is_loaded(
    kind, has_avx2, is_refused, monkeypatch
):
    monkeypatch.setattr(machine.platform, "machine", lambda: kind)
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: has_avx2)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ValueError, match="AVX2") if is_refused else contextlib.nullcontext():
        machine.check_machine()


@pytest.mark.parametrize(
    ("compiler", "has_headers", "named"),
    [("/usr/bin/gcc", True, []), (None, True, ["C compiler"]), ("/usr/bin/gcc", False, ["Python.h"]),
     (None, False, ["C compiler", "Python.h"])],
)  # fmt: skip
def test_a_missing_compiler_or_header_is_named_with_the_package(compiler, has_headers, named, tmp_path):
    if has_headers:
        (tmp_path / "Python.h").touch()
    line = machine.missing_compiler(compiler, tmp_path)
    assert bool(line) == bool(named)
    if line:
        assert all(name in line for name in [*named, "build-essential", "python3-dev"])
        assert [name for name in ("C compiler", "Python.h") if name in line] == named


@pytest.mark.parametrize(
    ("driver", "cuda", "version"),
    [(OLD_DRIVER, "13.0", "550.54.14"), (NEW_DRIVER.format("575.57.08"), "13.0", "575.57.08"),
     (NEW_DRIVER.format("580.65.06"), "13.0", None), (NEW_DRIVER.format("610.3"), "13.2", None),
     (OLD_DRIVER, "12.8", None),
     ("no version", "13.0", None), (OLD_DRIVER, "99.0", None)],
)  # fmt: skip
def test_an_old_driver_is_named_with_the_version_that_torch_needs(driver, cuda, version):
    line = machine.old_driver(driver, cuda)
    assert (line is None) == (version is None)
    assert line is None or (version in line and "580" in line and "\n" not in line)


ARCHITECTURES = ["sm_75", "sm_80", "sm_90", "sm_100", "compute_120"]


@pytest.mark.parametrize(
    ("capability", "bfloat16", "keyword"),
    [((9, 0), True, None), ((8, 0), True, None), ((8, 9), True, None), ((12, 1), True, None),
     ((7, 5), False, None), ((7, 5), True, "bfloat16"), ((7, 0), False, "no code"),
     ((11, 0), True, "no code")],
)  # fmt: skip
def test_a_gpu_that_torch_or_bfloat16_does_not_support_is_refused(capability, bfloat16, keyword):
    line = machine.unsupported_gpu("a card", capability, ARCHITECTURES, bfloat16)
    assert (line is None) == (keyword is None)
    assert line is None or (keyword in line and "a card" in line)


@pytest.mark.parametrize(
    ("capability", "toolkit", "compiler", "keyword"),
    [((9, 0), True, True, None), ((9, 0), False, True, "nvcc"), ((9, 0), True, False, "g\\+\\+"),
     ((8, 9), True, True, "only weights"), ((8, 6), True, True, "Hopper"), ((0, 0), True, True, "Hopper"),
     ((10, 0), True, True, "Hopper GPUs only"), ((12, 0), True, True, "Hopper GPUs only")],
)  # fmt: skip
def test_fp8_without_its_gpu_or_its_compilers_is_refused(capability, toolkit, compiler, keyword):
    """RolloutEngine and the start of a run ask the same function."""
    device = machine.Device("a card", capability, toolkit, compiler)
    settings = RolloutSettings(fp8="on", tensor_parallel=4)
    for model in (None, model_config("Qwen/Qwen3-8B")):
        line = fp8.fp8_refusal(settings, model, device)
        assert (line is None) == (keyword is None)
        assert line is None or ("rollout.fp8" in line and "simulate" in line and re.search(keyword, line))
    for elsewhere in ("off", "simulate"):
        assert fp8.fp8_refusal(RolloutSettings(fp8=elsewhere), None, device) is None


# ---- look around -------------------------------------------------------------------------------------------
def test_the_compiler_is_the_one_that_triton_takes(tmp_path):
    from triton.runtime.build import _find_compiler

    path = {"PATH": str(tmp_path)}
    assert machine.find_compiler(path) is None
    clang = make_program(tmp_path / "clang")
    assert machine.find_compiler(path) == str(clang)
    gcc = make_program(tmp_path / "gcc")
    assert machine.find_compiler(path) == str(gcc)
    assert machine.find_compiler(path | {"CC": "missing"}) is None
    assert machine.find_compiler(path | {"CC": str(clang)}) == str(clang)
    if os.environ.get("CC") is None and machine.find_compiler(os.environ):
        assert machine.find_compiler(os.environ) == _find_compiler.__wrapped__("c")


def test_the_toolkit_is_the_users_choice_then_pips_then_the_systems(tmp_path):
    places = {name: tmp_path / name for name in ("home", "path", "cu13", "system")}
    for folder in places.values():
        make_program(folder / "bin" / "nvcc")
    on_path = {"PATH": str(places["path"] / "bin")}
    rest = [tmp_path / "missing", places["cu13"], places["system"]]
    find = machine.find_toolkit
    assert find(on_path | {"CUDA_HOME": str(places["home"])}, rest) == places["home"]
    assert find(on_path | {"CUDA_PATH": str(places["home"])}, rest) == places["home"]
    assert find(on_path, rest) == places["path"]
    assert find({}, rest) == places["cu13"]
    assert find({}, rest[2:]) == places["system"]
    assert find({"CUDA_HOME": str(tmp_path)}, rest) is None, "DeepGEMM looks nowhere else"
    assert find({}, rest[:1]) is None


def test_fp8_gets_the_toolkit_of_pip_without_putting_nvcc_on_the_path(tmp_path, monkeypatch):
    """With nvcc on PATH vLLM would take FlashInfer's kernels, which cannot be linked with that toolkit."""
    packages = tmp_path / "nvidia"
    make_program(packages / "cu13" / "bin" / "nvcc")
    spec = SimpleNamespace(submodule_search_locations=[str(packages)])
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: spec if name == "nvidia" else None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    environment = {"PATH": str(tmp_path)}
    monkeypatch.setattr(rollout.os, "environ", environment)
    rollout.set_vllm_environment(on_gpu=True)
    assert "CUDA_HOME" not in environment, "kernels of a bfloat16 engine stay as they are"
    rollout.set_vllm_environment(on_gpu=True, fp8=True)
    assert environment["CUDA_HOME"] == str(packages / "cu13") and environment["PATH"] == str(tmp_path)
    environment["CUDA_HOME"] = "/mine"
    rollout.set_vllm_environment(on_gpu=True, fp8=True)
    assert environment["CUDA_HOME"] == "/mine"


@pytest.fixture
def bare_gpu(monkeypatch, tmp_path):
    """Make this machine one with an H100 and nothing else; return the environment."""
    environment = {"PATH": str(tmp_path), "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    monkeypatch.setattr(machine.os, "environ", environment)
    monkeypatch.setattr(machine, "find_headers", lambda: tmp_path)
    monkeypatch.setattr(machine, "installed_toolkits", lambda cuda: [])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda rank: H100[0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda rank: H100[1])
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ARCHITECTURES)
    return environment


@pytest.mark.parametrize("fp8", ["off", "on"])
def test_a_bare_machine_is_refused_before_the_ranks_meet(fp8, bare_gpu, monkeypatch):
    """All causes are in one line. wait_for_ranks() comes before models and data."""
    monkeypatch.setattr(lifecycle, "wait_for_ranks", lambda *seconds: pytest.fail("the check comes too late"))
    with pytest.raises(ValueError, match="build-essential") as caught:
        lifecycle.connect_ranks(make_config(f"rollout.fp8={fp8}"))
    line = str(caught.value)
    assert "\n" not in line and "Python.h" in line and ("nvcc" in line) == (fp8 == "on")


def test_a_complete_machine_passes_and_too_many_ranks_do_not(bare_gpu, tmp_path, monkeypatch):
    for name in ("gcc", "g++", "nvcc"):
        make_program(tmp_path / "bin" / name)
    (tmp_path / "Python.h").touch()
    bare_gpu["PATH"] = str(tmp_path / "bin")
    on = RolloutSettings(fp8="on")
    assert machine.check_machine(True, fp8.fp8_refusal(on, device=machine.device_of_rank())) is None
    bare_gpu["LOCAL_WORLD_SIZE"] = "2"
    bare_gpu["LOCAL_RANK"] = "1"  # which has no device
    monkeypatch.setattr(lifecycle, "device_of_rank", None)
    with pytest.raises(ValueError, match="nproc-per-node"):
        lifecycle.connect_ranks(make_config())


def test_a_driver_that_hides_the_gpu_is_an_error_unless_the_user_hides_it(bare_gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "DRIVER_FILE", tmp_path / "version")
    assert machine.check_machine() is None, "no GPU at all"
    (tmp_path / "version").write_text(OLD_DRIVER)
    with pytest.raises(ValueError, match="550.54.14"):
        machine.check_machine()
    bare_gpu["CUDA_VISIBLE_DEVICES"] = ""
    assert machine.check_machine() is None


@pytest.mark.parametrize(
    ("address", "changed", "is_refused"),
    [("127.0.1.1", {}, True), (None, {}, True), ("10.0.0.7", {}, False),
     ("127.0.1.1", {"GLOO_SOCKET_IFNAME": "eth0"}, False), ("127.0.1.1", {"LOCAL_WORLD_SIZE": "16"}, False),
     ("127.0.1.1", {"MASTER_ADDR": "127.0.0.1"}, False)],
)  # fmt: skip
def test_a_hostname_that_only_its_own_node_can_reach_is_refused_on_several_nodes(
    address, changed, is_refused
):
    environment = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "node1"} | changed
    line = machine.unreachable_address(address, environment)
    assert (line is not None) == is_refused
    assert line is None or ("GLOO_SOCKET_IFNAME" in line and "node1" in line and "\n" not in line)


# ---- settings and models -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("model", "size", "is_whole"),
    [("Qwen/Qwen3-4B", 4, True), ("Qwen/Qwen3-4B", 8, False), ("Qwen/Qwen3-8B", 8, True),
     ("Qwen/Qwen3-30B-A3B", 2, True), ("Qwen/Qwen3-30B-A3B", 8, False), ("Qwen/Qwen2.5-0.5B", 2, False)],
)  # fmt: skip
def test_fp8_needs_whole_blocks_of_experts_of_a_dense_mlp_and_of_the_attention_output(model, size, is_whole):
    """9,728 / 8 = 1,216 is 9.5 blocks of 128; 12,288 / 8 is 12 blocks. DeepGEMM takes whole blocks.

    Qwen2.5-0.5B has 14 heads of 64: half of them are 3.5 blocks, and half of its MLP is 19 blocks.
    """
    config = model_config(model)
    line = fp8.fp8_refusal(RolloutSettings(fp8="on", tensor_parallel=size), config)
    assert (line is None) == is_whole and (line is None or "rollout.tensor_parallel" in line)


def test_fp8_needs_widths_of_whole_blocks_also_on_one_gpu():
    """SmolLM2 has hidden sizes 576 and 960, the first layer of GLM-4.5-Air a width of 10,944 = 85.5 * 128."""
    on = RolloutSettings(fp8="on")
    for hidden in (576, 960):
        small = LlamaConfig(hidden_size=hidden, num_attention_heads=8, intermediate_size=1536)
        assert f"width {hidden} of the model" in fp8.fp8_refusal(on, small)
        assert fp8.fp8_refusal(RolloutSettings(fp8="simulate"), small) is None
    air = Glm4MoeConfig(hidden_size=4096, intermediate_size=10944, first_k_dense_replace=1)
    assert "10944 of the MLP" in fp8.fp8_refusal(on, air)
    narrow = Qwen3MoeConfig(hidden_size=1024, num_attention_heads=8, head_dim=128, moe_intermediate_size=96)
    assert fp8.fp8_refusal(on, narrow) is None, "vLLM pads experts"


def test_the_first_start_with_fp8_may_compile_for_long(monkeypatch):
    on = make_config("rollout.fp8=on", "run.timeout_s=600")
    assert lifecycle.setup_timeout_s(on) == 600, "CPUs compile nothing"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert lifecycle.setup_timeout_s(on) > 3600
    assert lifecycle.setup_timeout_s(make_config("run.timeout_s=600")) == 600

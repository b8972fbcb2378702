"""A dense bfloat16 copy of a quantised checkpoint, for a vLLM build without kernels for its weights.

The copy is kept in the cache directory under the checkpoint's fingerprint, so it is made once. It is for small
checkpoints such as the bundled demo: a dense copy of a 27B does not belong on a CPU.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from soloist.errors import CapacityError

LARGEST = 8 * 2**30  # bytes of the dense copy
CACHE = Path("~/.cache/soloist/dense")
BESIDE = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def dense_copy(directory: Path, cache: Path | None = None) -> Path:
    """The directory of the dense copy, made if it is not there. Raises CapacityError for a large checkpoint."""
    import torch
    from safetensors.torch import save_file

    from soloist.checkpoint.reader import open_checkpoint

    opened = open_checkpoint(directory, beside=False)
    size = 2 * sum(row.parameters for row in opened.summary())
    if size > LARGEST:
        raise CapacityError(
            f"A dense copy of {directory} takes {size / 2**30:.0f} GiB.",
            "Use the original dense checkpoint, or a card.",
        )
    target = (cache or CACHE.expanduser()) / opened.fingerprint()[:16] / directory.resolve().name
    if target.is_dir():
        return target
    tensors: dict[str, torch.Tensor] = {}
    for name, info in opened.tensors.items():
        module = name.rsplit(".", 1)[0]
        if module in opened.modules and f"{module}.weight" not in opened.tensors:
            stored = info.name.rsplit(".", 1)[0] + ".weight"
            if stored not in tensors:
                tensors[stored] = opened.tensor(f"{module}.weight").to(torch.bfloat16)
        else:
            tensors[info.name] = opened.tensor(name)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        part = Path(folder) / "part"
        part.mkdir()
        save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
        (part / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        for name in BESIDE:
            if (directory / name).is_file():
                shutil.copyfile(directory / name, part / name)
        part.rename(target)
    return target

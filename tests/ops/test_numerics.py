"""The fingerprint says whose state this is: what computed it counts, what served it does not."""

from pathlib import Path

import pytest
import torch

from soloist.ops import numerics


def test_kernels_and_codecs_are_part_of_the_numerics(tmp_path: Path) -> None:
    files = {"ops/cuda/a.cu": "1", "models/a.py": "1", "cache/codecs.py": "1", "server/a.py": "1", "ops/notes.md": "1"}

    def digest(**changed: str) -> str:
        package = tmp_path / str(len(list(tmp_path.iterdir())))
        for name, text in (files | {n.replace("__", "/"): t for n, t in changed.items()}).items():
            path = package / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return numerics.code_digest(numerics.DECISIVE, package)

    same = digest()
    assert digest() == same == digest(**{"server__a.py": "2"}) == digest(**{"ops__notes.md": "2"})
    others = [digest(**{name: "2"}) for name in ("ops__cuda__a.cu", "models__a.py", "cache__codecs.py")]
    assert len({same, *others}) == 4


def test_another_source_is_another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def said() -> dict[str, str]:
        return numerics.fingerprint(torch.device("cpu"), torch.float32, torch.float32, "rows")

    before = said()
    monkeypatch.setattr(numerics, "code_digest", lambda rooms: f"other {rooms}")
    after = said()
    assert {name for name in before if before[name] != after[name]} == {"code"}

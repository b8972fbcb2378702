"""Kernels run in Triton's interpreter on a CPU; on a machine with a card they run there."""

import pytest
import torch

pytest.importorskip("triton")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")

"""Tests run side by side: every process computes on one thread, or two of them spin at each other's barriers."""

import os

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "THREADS"):
    os.environ.setdefault(name, "1")

# Triton decides at import whether kernels are compiled or interpreted, so it must be told before any test imports one.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

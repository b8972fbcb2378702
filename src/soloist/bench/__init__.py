"""Measure a running server from outside, with one client for Soloist and for its peers.

    client      one request and its times        scenarios/  what is sent and which table comes out
    measure     the formulas                     quality/    perplexity, exact match, needles, divergence
    result      a run as data                    report      several runs side by side

`step` and `products` are different: they time the engine and the kernels from inside.
"""

"""Is the answer still right? Perplexity, exact match, needles, and the divergence of two servers.

A speed figure without one of these beside it is not published. All read local files; docs/quality.md has the formats.
"""

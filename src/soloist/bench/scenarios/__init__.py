"""One file per scenario: what is sent, and which table and plot come out."""

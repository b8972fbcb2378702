"""What `soloist doctor` looks at: one file per subject, each check with every outcome it can have.

An outcome's words stand in the check and nowhere else: the terminal, `--json` and docs/troubleshooting.md (made by
`soloist doctor --markdown`) all read them from there.
"""

"""One module per subcommand; `soloist draft-vocab` is `commands/draft_vocab.py`.

A command module holds `app`, a `typer.Typer`: one `@app.command()` makes a plain command, several (or a callback)
make a group such as `soloist bench`. Functions stay thin: at module level import only typer and light modules
(settings, errors), inside the function the room that does the work, so that `soloist --help` and `soloist chat`
never wait for torch. Raise from the tree in `errors.py`; `cli.py` prints the remedy and picks the exit code.
Names that start with an underscore are not commands.
"""

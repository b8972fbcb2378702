"""More than one card or many users: the same model directory and knobs on vLLM's server.

mapping   one table: which vLLM option a knob becomes, and what is refused with which reason
launch    the command line, its environment, and starting it in place of our server
"""

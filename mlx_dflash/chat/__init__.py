"""`python -m mlx_dflash.chat`: a conversation with a target in the terminal, with drafting.

conversation.py keeps the messages and the caches, without a terminal, and files.py keeps them in files; terminal.py
reads lines, view.py shows answers, commands.py has the commands that begin with a slash, settings.py what they set.
"""

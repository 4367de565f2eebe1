"""`python -m mlx_dflash.chat`: a conversation with a target in the terminal, with drafting.

conversation.py keeps the messages and the caches, without a terminal; terminal.py reads lines and shows answers;
commands.py is what begins with a slash.
"""

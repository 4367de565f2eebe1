"""`python -m mlx_dflash.server`: the OpenAI API over a target and its draft, with mlx-lm's server underneath.

requests.py reads request bodies; provider.py holds the pair; generator.py makes the tokens, one request at a time;
answers.py writes response bodies; handler.py speaks HTTP; metrics.py counts.
"""

"""`python -m mlx_dflash.server`: the OpenAI API over a target and its draft.

The way of a request: handler.py speaks HTTP, requests.py reads the body, worker.py queues it for the one thread that
generates, generator.py makes the tokens with the pair of provider.py, and answers.py writes the response body.
errors.py has the errors that a client sees, and metrics.py counts.
"""

"""`python -m mlx_dflash COMMAND ...`: the list of commands, and their dispatch."""

import runpy
import sys

COMMANDS = {
    "generate": "one prompt in, the target's text out; the demo pair without --model",
    "chat": "talk with a target in the terminal",
    "server": "serve the OpenAI API",
    "trace": "show what each cache covers, round by round",
    "benchmark": "speed, acceptance and identity, side by side with mlx-lm",
    "convert": "Hugging Face or GGUF weights to MLX format, targets and drafts",
    "train": "make a draft for any target: its own text, a fit, what it is worth",
    "doctor": "what this machine and this pair can do, every mismatch with its cure",
    "metalcheck": "whether the Metal kernels are right and fast on this Mac",
}


def main() -> None:
    arguments = sys.argv[1:]
    if arguments and arguments[0] in COMMANDS:
        sys.argv[1:] = arguments[1:]
        runpy.run_module(f"mlx_dflash.{arguments[0]}", run_name="__main__", alter_sys=True)
        return
    lines = "\n".join(f"  {name:<10} {what}" for name, what in COMMANDS.items())
    usage = f"usage: python -m mlx_dflash COMMAND [options]\n\ncommands:\n{lines}\n\nEach is also a module: python -m mlx_dflash.generate --help"
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage)
        return
    sys.exit(f"{usage}\n\nerror: there is no command {arguments[0]!r}")


if __name__ == "__main__":
    main()

"""The list of commands: `python -m mlx_dflash COMMAND ...` runs the module mlx_dflash.COMMAND."""

import runpy
import sys

COMMANDS = {
    "generate": "generate text from one prompt",
    "chat": "talk with a target in the terminal",
    "server": "serve a target over the OpenAI API",
    "trace": "show round by round which tokens are drafted and kept, and what each cache covers",
    "benchmark": "measure speed and kept drafts beside mlx-lm, and compare the texts",
    "convert": "convert targets and drafts from Hugging Face or GGUF weights to MLX",
    "train": "train a draft for a target",
    "doctor": "check whether this machine, a target and a draft fit together",
    "metalcheck": "check whether the Metal kernels are right and fast on this Mac",
}


def main() -> None:
    """Run the command that the first argument names, or list the commands. Exits with 1 if there is none such."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] in COMMANDS:
        sys.argv[1:] = arguments[1:]
        runpy.run_module(f"mlx_dflash.{arguments[0]}", run_name="__main__", alter_sys=True)
        return
    lines = "\n".join(f"  {name:<10} {what}" for name, what in COMMANDS.items())
    usage = (
        f"usage: python -m mlx_dflash COMMAND [options]\n\ncommands:\n{lines}\n\n"
        "Most of them use the demo pair if no --model is given. Options: python -m mlx_dflash COMMAND --help"
    )
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage)
        return
    sys.exit(f"{usage}\n\nerror: there is no command {arguments[0]!r}")


if __name__ == "__main__":
    main()

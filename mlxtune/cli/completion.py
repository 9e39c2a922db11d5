"""`mlxtune completion`, and the answers to a shell that completes a command line.

Both are click's own, but click cannot know which of our text options name a file, a folder or one
of a few words. Their metavar shows it.
"""

from __future__ import annotations

import re

import click
from click.shell_completion import CompletionItem, shell_complete

# Set by the shell's script to its request; the name is click's convention.
VARIABLE = "_MLXTUNE_COMPLETE"
_FOLDERS, _FILES = ("DIR", "RUN"), ("PATH", "FILE")

_HELP = """Print the completion script of a shell.

\b
bash: put   eval "$(mlxtune completion bash)"   into ~/.bashrc (bash 4.4 or later)
zsh:  put   eval "$(mlxtune completion zsh)"    into ~/.zshrc, after compinit
fish: mlxtune completion fish > ~/.config/fish/completions/mlxtune.fish
"""


@click.command(help=_HELP, epilog="Example: mlxtune completion zsh")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    context = click.get_current_context()
    context.exit(complete(context.find_root().command, f"{shell}_source"))


def complete(command: click.Command, request: str) -> int:
    """Answer a request such as `bash_complete` or `bash_source`; return the exit code."""
    for each in getattr(command, "commands", {}).values():
        for parameter in each.params:
            if parameter.type is click.STRING and parameter.metavar:
                parameter.type = _Words(parameter.metavar)
    return shell_complete(command, {}, "mlxtune", VARIABLE, request)


class _Words(click.types.StringParamType):
    """Text whose values follow from its metavar: `a|b`, or PATH, FILE, DIR, RUN."""

    def __init__(self, metavar: str) -> None:
        # The name in `RUN [RUN]...` and `[DIR]`.
        named = re.match(r"\[?([A-Z]+)\b", metavar)
        self._metavar = named[1] if named else metavar

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the words with that prefix, or have the shell look for files or folders."""
        if self._metavar in _FOLDERS or param.name == "model_path":
            return [CompletionItem(incomplete, type="dir")]
        if self._metavar in _FILES:
            folder = str(param.name).endswith("_dir")
            return [CompletionItem(incomplete, type="dir" if folder else "file")]
        words = self._metavar.split("|") if "|" in self._metavar else []
        return [CompletionItem(word) for word in words if word.startswith(incomplete)]

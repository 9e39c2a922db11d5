"""The exit codes of the command and their meanings, for main() and for the reference."""

DONE, FAILED, MISUSED = 0, 1, 2
EXIT_CODES = {
    DONE: "done",
    FAILED: "a file, a model or a run failed; verify: a check failed; doctor: training is "
    "impossible here",
    MISUSED: "invalid options",
    129: "the terminal was closed; the run was saved",
    130: "Ctrl-C; the run was saved",
    143: "SIGTERM; the run was saved",
}

"""The exit codes of the command and their meanings, for main() and for the reference."""

DONE, FAILED, MISUSED = 0, 1, 2
EXIT_CODES = {
    DONE: "done",
    FAILED: "a file, a model or a run failed; verify: a check failed; doctor: training is "
    "impossible here",
    MISUSED: "options are wrong",
    129: "the terminal was closed; what was trained is saved",
    130: "Ctrl-C; what was trained is saved",
    143: "SIGTERM; what was trained is saved",
}

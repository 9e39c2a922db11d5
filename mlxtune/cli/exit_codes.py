"""What the exit codes of the command mean, for main() and for the reference."""

DONE, FAILED, MISUSED = 0, 1, 2
EXIT_CODES = {
    DONE: "done",
    FAILED: "a file, a model or a run failed; verify: a check failed; doctor: training is "
    "impossible here",
    MISUSED: "options are wrong",
    129: "stopped by a terminal that was closed; what was trained is saved",
    130: "stopped by Ctrl-C; what was trained is saved",
    143: "stopped by SIGTERM; what was trained is saved",
}

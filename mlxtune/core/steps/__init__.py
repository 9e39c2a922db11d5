"""The layout of steps: order of rows, groups, packs, memory."""

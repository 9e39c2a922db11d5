"""What a step trains on and how it is laid out: order, groups, packs, memory."""

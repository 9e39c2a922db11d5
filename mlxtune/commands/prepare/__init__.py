"""What commands set up before they work: options, data, model and plan."""

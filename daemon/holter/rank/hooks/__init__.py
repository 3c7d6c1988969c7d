"""Where torch and the script call us: step, backward, model call, data, save, exit."""

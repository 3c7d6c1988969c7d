"""The hooks by which torch and the script call us: step, backward, model call, data, save, exit."""

"""Records of runs (`recording`) and their display (`showing`); the modules here are the commands."""

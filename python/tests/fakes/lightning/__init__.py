"""As much of Lightning as calls callbacks."""

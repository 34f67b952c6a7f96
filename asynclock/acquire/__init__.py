"""How a hold is acquired, renewed, passed on and released."""

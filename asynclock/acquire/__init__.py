"""How a hold is got, kept, passed on and given back."""

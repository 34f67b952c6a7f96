"""Small models of the protocol, which a machine walks through in full. Start with README.md."""

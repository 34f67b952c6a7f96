"""The shipped client and the shipped rules, simulated: many clients and nodes in virtual time, with faults drawn from a
seed. See README.md."""

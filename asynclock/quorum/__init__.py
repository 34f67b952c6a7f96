"""Asks N nodes, counts their votes, and judges restarted servers."""

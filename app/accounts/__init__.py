"""Accounts: names, passwords, throttling of sign-ins, links that work once."""

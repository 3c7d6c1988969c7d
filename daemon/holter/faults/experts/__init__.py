"""Mixtures of experts: who gets the tokens, who loses them, and whether anything balances them."""

"""Example tasks on real data that needs no download."""

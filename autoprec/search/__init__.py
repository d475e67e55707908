"""The search: spaces, static plans, the objective that really trains and really times, and the study around it."""

"""Rewards: functions, their weighted composition, and the killable processes that run them."""

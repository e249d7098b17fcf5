"""What methods are put together from: rules, estimators of servers, compressions, warm starts."""

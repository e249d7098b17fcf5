"""The stage between the clients' messages and the server: what happens to messages before a method gets their mean.

stage_plan      whether a run adds messages up or collects them, and whether its rule can be used
message_rows    the vectors of a message, and the messages of a round as rows of files
staged          what a worker does with a message: it writes it to a row, or changes it before it is added up
passes          what workers compute of the rows, piece by piece
round_messages  the messages of one round, which the driver reads by passes
attack          what Byzantine clients send that look at the messages of others
rule            the rule on the messages of a round, and the message that takes the place of the mean
stage           the driver's entrance, for both ways through the stage
"""

"""The stage between the clients' messages and the server: what happens to messages before a method gets their mean.

planning      whether a run adds messages up or collects them, and whether its rule can be used
vectors       the vectors of a message, and the pieces in which workers go through them
message_rows  the messages of a round as rows of files
staged        what a worker does with a message: it writes it to a row, or changes it before it is added up
passes        what workers compute of the rows, piece by piece, and how the driver asks for it; sorting has the columns
collected     the messages of one round, and what the stage keeps between rounds
defence       the rule on the messages of a round
attacking     what Byzantine clients send that look at the messages of others
stage         the driver's entrance, for both ways through the stage
"""

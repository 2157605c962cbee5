drop table races;

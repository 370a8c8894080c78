"""The prompts of the workloads: 28 short ones and 10 long ones, each sent as one user message.

They are here to make a batch interesting. Prompts that look alike ask for answers of very different lengths, so
requests that start together do not end together: one asks for a number and is gone after a few steps, its neighbour
asks for a story and goes on until something stops it. This is what makes it expensive to wait for the slowest request
of a batch.

`SHORT` holds messages of 8 to 27 tokens. Several come in pairs that share most of their words and little else: name a
river, tell me about a river. `LONG` holds messages of about 450 to 490 tokens, each a small text followed by a question
or a task: the prefill costs much more, while the answer is no longer than that of a short prompt.

All counts are in tokens of the SmolLM2 tokenizer. The chat template adds 30 tokens to every message: 24 in front of it
(the standard system message, the same for everybody) and 6 behind it. So the model is given 38 to 57 tokens for a short
prompt and 481 to 521 for a long one.

How long the answers are, when SmolLM2-135M-Instruct always takes the likeliest token and we stop it after 96:

    answer tokens, with the end-of-sequence token      SHORT   LONG
    2 to 24                                               12      3
    25 to 59                                               3      3
    60 to 95                                               3      1
    still going after 96                                  10      3

The boundaries are soft. The numbers come from float32 on a CPU, one request at a time. Other arithmetic can turn a
close decision, and one different word can send an answer down another road: the lengths are a property of this model,
not of the prompts. Nor are the answers good. The model is tiny, and it believes that a snail is faster than a train.
Only the lengths matter here.

The order is mixed on purpose, so that even a few neighbours in a tuple differ in the length of their answers.
"""

SHORT: tuple[str, ...] = (
    "Is a tomato heavier than a grand piano? Answer with yes or no.",
    "Tell me about a river that flows through Europe.",
    "What is 7 plus 5? Answer with the number only.",
    "Explain in two sentences why the sky is blue.",
    "What colour is a ripe banana? Answer with one word.",
    "Tell me a long story about a lighthouse keeper who is afraid of the dark.",
    "Which city is the capital of France?",
    "In one sentence, what is a queue?",
    "What should I pack for a weekend by the sea? I have one small bag, no umbrella and a dog that dislikes sand.",
    "Put these words into alphabetical order: spoon, ladle, kettle, fork.",
    "A lift holds eight people and twelve are waiting. How many trips does it need?",
    "Which is faster, a snail or a train? Answer with one word.",
    "What is 7 plus 5? Explain every step as you would to a child.",
    "Name three vegetables, separated by commas, without any explanation.",
    "How many days are there in a week? Answer with the number only.",
    "Write a recipe for tomato soup with bread.",
    "Tell me a very short story, of one sentence only, about a lighthouse keeper.",
    "List three things that one finds in a kitchen.",
    "Two guests want soup, one wants rice and nobody wants pears. Which dish is left over? Answer with one word.",
    "What is a queue, and why do people stand in one?",
    "Can a bus carry more than one passenger? Answer with yes or no.",
    "Which city is the capital of France, and what can one do there on a rainy day?",
    "Name a river that flows through Europe.",
    "Write a haiku about waiting for the bus.",
    "What is the opposite of full? Answer with one word.",
    "Is this review friendly or angry? Answer with one word: The soup was cold, and the waiter laughed at my spoon.",
    "Explain in detail why the sky is blue.",
    "How do I teach a parrot to be quiet in a library?",
)

LONG: tuple[str, ...] = (
    # Meeting notes: should a lift wait for more passengers?
    (
        "Notes of the residents' meeting at Harbour Court, held on Thursday evening in the laundry room. Present: "
        "Ines, Tobias, Marguerite, old Mr Lund from the ninth floor, and the caretaker, Bram. Minutes taken by "
        "Tobias.\n\n"
        "The only item on the agenda was the lift. Since the bakery on the ground floor opened, the lift has been "
        "busy from seven in the morning until well after nine, and people have begun to complain about it in "
        "writing, on the walls of the lift.\n\n"
        "Ines opened with figures. She had stood in the lobby for three mornings with a notebook. The lift holds "
        "eight people, but on average it leaves with two, because somebody steps in, presses a button at once, "
        "and off it goes. Each round trip takes about ninety seconds whether it carries one passenger or eight. "
        "'We are not short of lift,' she said. 'We are short of patience.'\n\n"
        "Marguerite proposed that the doors should stay open for twenty seconds, so that more people can share "
        "each trip. Mr Lund objected. He is usually the first one in, and he does not see why he should stand "
        "there looking at the wall so that somebody else may save a minute. Ines answered that he gains too: if "
        "every trip carries more people, the lift is back sooner for everyone, including him on his way home with "
        "the bread.\n\n"
        "Bram pointed out that twenty seconds makes sense at half past seven but is silly at three in the "
        "afternoon, when nobody is coming. He suggested a compromise. The doors close as soon as four people are "
        "inside, or after ten seconds, whichever happens first. Nobody ever waits longer than ten seconds, and in "
        "the busy hour nobody waits at all, because four people turn up almost immediately.\n\n"
        "The vote was four in favour and none against. Mr Lund abstained, and asked for a folding seat to be "
        "fitted. This was agreed, provided that he pays for the cushion himself. Bram will change the setting of "
        "the doors on Monday. The next meeting takes place in the first week of March, again in the laundry room, "
        "after the last spin cycle.\n\n"
        "Was the proposal accepted? Answer with one word: yes or no."
    ),
    # A lab report: one line or four?
    (
        "Report on a small experiment with queues, carried out in the canteen of the Lower Mill School by the "
        "pupils of the sixth year.\n\n"
        "Question. The canteen has four tills. Until now each till has had its own line, and everybody believes "
        "that they always choose the slowest one. We wanted to find out whether a single line that feeds all four "
        "tills would be better.\n\n"
        "Method. On Monday and Tuesday we left the canteen as it was. On Wednesday and Thursday we stretched a "
        "rope across the room, so that there was only one line, and whoever stood at the front went to the next "
        "free till. Two pupils sat on the radiator with stopwatches. They gave a numbered card to every guest who "
        "joined the line and took it back at the till. We measured 212 guests on the first two days and 205 on "
        "the other two. The menu was the same on all four days, by kind permission of the cook, who likes "
        "lentils.\n\n"
        "Results. With four lines, the average wait was 3 minutes and 10 seconds. With one line it was 2 minutes "
        "and 40 seconds. That is better, but not by very much. The longest wait changed far more. With four "
        "lines, one guest stood for 11 minutes behind a teacher who was paying in small coins. With one line, "
        "nobody waited longer than 5 minutes, because the guests behind the teacher simply went to the other "
        "tills.\n\n"
        "Discussion. The tills did not work any faster. They had the same number of guests and the same lentils. "
        "What changed is that a till never stood idle while somebody was waiting elsewhere, and that one slow "
        "payment no longer held up a whole line. Some guests complained that the single line looked frightfully "
        "long. It did, but it also moved four times as fast. One source of error is that on Thursday there was a "
        "rehearsal, and the choir came late and all at once.\n\n"
        "Conclusion. The average is only half of the story. A single line is a little faster for most of us, and "
        "much kinder to the unluckiest guest.\n\n"
        "Summarise this report in three sentences."
    ),
    # A manual: fill the machine, or start it half empty?
    (
        "Hood-type dishwasher, model with two racks. Chapter 4: Daily use.\n\n"
        "4.1 Before the first load. Open the water tap, close the drain and press the green button. The tank "
        "takes about twelve minutes to heat. The lamp above the button blinks while the water is cold and stays "
        "lit when the machine is ready. Do not start a wash while the lamp is blinking; the plates will come out "
        "wet, greasy and reproachful.\n\n"
        "4.2 Loading. One rack holds eighteen plates or thirty-six glasses, but not both. Put plates with plates "
        "and glasses with glasses, because a mixed rack must be washed as long as its dirtiest piece needs. "
        "Scrape off leftovers first. Cups go upside down. Wooden spoons, cast iron and the good knives do not "
        "belong in the machine at all.\n\n"
        "4.3 Choosing a programme. The short programme takes two minutes and is meant for glasses. The normal "
        "programme takes four minutes and is right for plates. The long programme takes seven minutes and is for "
        "pans in which something has gone wrong. The time is the same for a full rack and for a rack with a "
        "single saucer in it, and so is the amount of water. It therefore pays to fill the rack before you pull "
        "down the hood.\n\n"
        "4.4 When to wait and when not to wait. During a quiet afternoon, collect dishes until the rack is full. "
        "During the dinner hour, start as soon as the kitchen has fewer than ten clean plates left, even if the "
        "rack is half empty. A cook without plates costs more than a little warm water. If two racks are waiting, "
        "wash the one that was filled first, unless it contains pans.\n\n"
        "4.5 At the end of the day. Press the red button and keep it pressed for three seconds. The machine "
        "drains, rinses itself and switches off. Lift out the filter, knock it clean over the bin and leave the "
        "hood open overnight so that the inside can dry. Once a week, pour half a cup of descaling powder into "
        "the empty tank and run the long programme without a rack.\n\n"
        "How many plates fit in one rack? Answer with the number only."
    ),
    # An e-mail thread: how to share one oven
    (
        "From: Petra. To: everybody at the bakery. Subject: The big oven. Dear all, this morning I opened the big "
        "oven at five and found a single tray of almond biscuits in it, sitting in the middle like a guest who "
        "has come on the wrong day. The oven takes twelve trays. It needs the same hour and the same gas for one "
        "tray as for twelve. Could we please talk to each other before we switch it on? Kind regards, Petra.\n\n"
        "From: Anselm. To: everybody at the bakery. Subject: Re: The big oven. Dear Petra, the biscuits were "
        "mine. I am sorry, but a customer wanted them by six, and there was nothing else ready to go in with "
        "them. The rolls were still rising and the rye had only just been shaped. If I had waited for the others, "
        "the oven would have been beautifully full and the customer would have been gone. What should I do the "
        "next time? Yours, Anselm.\n\n"
        "From: Leonie. To: everybody at the bakery. Subject: Re: Re: The big oven. Hello you two, there is no "
        "need to wait for a full oven, and no need to bake a single tray either. The door can be opened in the "
        "middle of the hour, you know! When the biscuits are done after fifteen minutes, take them out and slide "
        "in whatever is ready by then. The rye stays where it is. No tray has to wait for another tray to finish, "
        "and no shelf stays empty for long. I have done it like this on Saturdays for years, and I thought that "
        "everybody knew. Love, Leonie.\n\n"
        "From: Petra. To: everybody at the bakery. Subject: Re: Re: Re: The big oven. Dear Leonie, I have worked "
        "here since the spring and nobody told me that the door may be opened. Let us try it from Monday. "
        "Somebody has to write down when each tray went in, or we will forget the rye again. I will hang a slate "
        "beside the oven and buy the chalk. And Anselm, please leave me a few of those biscuits. Kind regards, "
        "Petra.\n\n"
        "In one sentence, what does Leonie propose?"
    ),
    # A short story: a driver who waits
    (
        "The last bus of the night left Quarry Lane at ten minutes to midnight, and Oda had driven it for eleven "
        "years. She knew the route the way one knows a staircase in the dark. Nineteen stops, two hills, one "
        "bridge, and at the end the depot with its smell of rubber and cold coffee.\n\n"
        "There was a rule about the last bus, although it was not printed anywhere. By day you left on time. If "
        "somebody came running, you shrugged at them in the mirror, for there would always be another bus in "
        "eight minutes, and forty people on board had places to be. But after the last bus there was only the "
        "road. So at night, Oda waited. She waited for the cook from the noodle shop, who always had one more pan "
        "to dry. She waited for the two nurses, and for the student who read while walking and had twice missed "
        "the bus while standing beside it.\n\n"
        "The new inspector did not like this. He rode along one evening in November with a watch in his palm. At "
        "the noodle shop Oda stopped, and opened the doors, and nobody came. 'What are we doing?' asked the "
        "inspector. 'Collecting,' said Oda. A minute went by. The inspector wrote something down. Then the light "
        "in the shop went off, and the cook came out with his coat half on and a paper bag in each hand. He gave "
        "one bag to Oda, as he did every night, and after a moment's thought he gave the other one to the "
        "inspector.\n\n"
        "They drove on. The bag was warm. At the hospital they waited for two minutes, and at the library for "
        "three, and the inspector no longer looked at his watch, because one needs both hands for dumplings. When "
        "they came to the bridge there were nine passengers on board, and everybody was talking at once.\n\n"
        "It was there, in the very middle of the bridge, that the headlights fell on a small suitcase standing "
        "quite alone in the road. Oda braked. The suitcase was red. Something inside it was ringing.\n\n"
        "Continue this story. Tell what Oda, the inspector and the passengers did next."
    ),
    # A weather bulletin: the harbour plans its week
    (
        "Bulletin of the harbour office at Kettle Bay for the coming week, read on the local radio at six in the "
        "morning and pinned to the door of the fish hall.\n\n"
        "Monday. Fog until ten, then pale sunshine. Hardly any wind. Ships of any size may enter, but one at a "
        "time, and slowly, with their bells ringing. We expect five freighters that waited outside during the "
        "night. They will be called in the order of their arrival, except for the one with the bananas, which is "
        "called first, since the bananas cannot wait and the gravel can.\n\n"
        "Tuesday. Wind from the west, fresh, rising to strong in the afternoon. The two tall cranes stop at noon "
        "and are tied down. The small crane continues. Anyone who has only a few crates to unload should come in "
        "the morning and not stand behind the grain ship, which will need both tall cranes for the whole of it.\n\n"
        "Wednesday. Storm from the north-west, with heavy rain. The harbour is closed. The tugs stay on their "
        "ropes, the pilots stay in bed, and the canteen stays open. Masters of vessels at sea are asked to slow "
        "down today rather than to hurry and then wait outside; a slow ship burns less oil, and the quay will be "
        "just as full.\n\n"
        "Thursday. The storm moves away by dawn. Showers, a rainbow or two, and a long swell. From eight o'clock "
        "we will take in as many ships as there are free berths, and as soon as a berth falls free we will take "
        "in the next ship, without waiting for the whole quay to be empty. With luck the queue will be gone by "
        "midnight.\n\n"
        "Friday and Saturday. Dry, cold and clear, with a light wind from the east. Good days for painting hulls "
        "and mending nets. The rowing club is allowed to cross the main channel, if it looks both ways. The crane "
        "drivers have Saturday off and have asked not to be rung up about bananas.\n\n"
        "Sunday. Frost in the morning. The harbour office is closed, but the old lighthouse keeper will answer "
        "the telephone if you let it ring for long enough.\n\n"
        "On which day is the harbour closed because of a storm? Answer with one word."
    ),
    # A code review: a queue with a bug at one end
    (
        "Review of change 41, 'Let the print server join small jobs', written by Yusuf and reviewed by Hanne.\n\n"
        "Summary of the change. The print server in the reading room used to warm up the drum for every job, "
        "print it, and let the drum cool down again. Warming up takes longer than printing a page. With this "
        "change the server looks into the queue before it starts, takes up to sixteen waiting pages, and prints "
        "them all while the drum is hot.\n\n"
        "Comment 1, on the name of the function. Hanne: 'The function is called process. Everything is a process. "
        "May I suggest take_batch?' Yusuf: 'Renamed.'\n\n"
        "Comment 2, on the order. Hanne: 'You take jobs from the end of the list, because that is what pop does "
        "when it has no argument. So the newest job is printed first, and on a busy day the oldest one is never "
        "printed at all. I think there is a student who has been standing beside the printer since Tuesday.' "
        "Yusuf: 'You are right. It is a deque now and takes from the left. I have added a test with three jobs, "
        "and I have sent a biscuit to the student.'\n\n"
        "Comment 3, on a large job. Hanne: 'What happens when the first job in the queue has forty pages? It does "
        "not fit into sixteen, so the loop takes nothing, prints nothing and tries again for ever.' Yusuf: 'A job "
        "that is too long is now split into pieces. The rest goes back to the front of the queue, not to the end, "
        "so that a thesis still comes out in one stack.'\n\n"
        "Comment 4, on waiting. Hanne: 'If the queue is empty, the loop asks again at once and keeps one core "
        "busy all night. Please let it sleep until a job arrives.' Yusuf: 'Done, with a condition variable.'\n\n"
        "Comment 5, on the tests. Hanne: 'They are clear, and I like the one called test_nobody_starves. All of "
        "them pass on my machine, and the idle load is down to zero. I have no further remarks. Approved; please "
        "merge it before lunch, when the essays are due.'\n\n"
        "Was the change approved in the end? Answer with yes or no."
    ),
    # A recipe: forty dumplings, one pot
    (
        "Dumplings for a crowd. This recipe makes about forty dumplings, which is enough for eight polite guests "
        "or for four honest ones. You need a wide pot, a slotted spoon, a floured board and, if possible, "
        "somebody to talk to while you fold.\n\n"
        "For the dough, put 400 grams of flour into a bowl with a pinch of salt. Pour in 200 millilitres of hot "
        "water and stir with a fork until it looks hopeless. Then knead it with your hands for ten minutes, until "
        "it is smooth. Cover it with a cloth and leave it alone for half an hour. Dough that is not given time to "
        "rest will take its time later, when you try to roll it out.\n\n"
        "For the filling, chop half a white cabbage, two carrots, a bunch of spring onions and a handful of "
        "mushrooms, all very finely. Fry them in a spoonful of oil with grated ginger and garlic until the pan is "
        "dry. Season with soy sauce and a little pepper, and let the mixture cool, or it will melt through the "
        "dough.\n\n"
        "Roll the dough into a long rope, cut it into forty pieces and flatten each of them into a circle. Put a "
        "teaspoon of filling on every circle, fold it in half and press the edge firmly with your thumb. The "
        "first three will look strange. The cook eats these.\n\n"
        "Now to the boiling, which is where most people go wrong. Bring the water to a lively boil and add ten "
        "dumplings, not more, for too many at once will cool the water and stick together. A dumpling is done "
        "when it rises to the top and has floated for one minute. They do not all rise together: the thin ones "
        "are quick and the fat ones are slow. Do not wait for the last of them. Lift out each dumpling when it is "
        "ready, and drop in a fresh one in its place, so that there are always ten in the pot. In this way all "
        "forty are cooked in about a quarter of an hour, and nobody has to watch an empty pot or eat a soggy "
        "dumpling.\n\n"
        "How many dumplings does this recipe make? Answer with one number."
    ),
    # The terms of a library: who may keep what, and for how long
    (
        "Welcome to the Millpond Library. Please read these terms once, slowly, and then keep them inside your "
        "favourite book, where you will find them again in ten years.\n\n"
        "1. Your card. Anyone who lives within a day's walk of the pond may have a card. The card is free. A lost "
        "card costs one coin, or one jar of jam, to be handed in at the desk.\n\n"
        "2. Borrowing. You may have six things at home at the same time. As soon as you bring one of them back, "
        "you may take another; there is no need to return all six together. Novels may be kept for 28 days, films "
        "for 7 days, and maps for as long as the journey lasts. The large atlas does not leave the building, "
        "because it does not fit through the door.\n\n"
        "3. Waiting lists. If a book is out, we put your name on its list. Lists are served strictly in order. We "
        "are often asked whether a fast reader might be allowed to go first, since the book would be back so "
        "soon, and the average wait would indeed be shorter. But the slow readers would then never get the book "
        "at all, and they are our most faithful guests. When your turn comes we send you a card by post and keep "
        "the book for you for 3 days. After that it goes to the next name.\n\n"
        "4. Renewals. You may renew a book twice, unless somebody is waiting for it. If somebody is waiting, "
        "please finish your chapter and bring it back. You may put your own name at the end of the list and "
        "continue later from the same page. We lend bookmarks for this purpose.\n\n"
        "5. The reading room. It has twelve chairs. When all of them are taken, please wait in the hall and not "
        "between the shelves, where you would block those who only want to fetch something quickly. Whoever "
        "leaves for more than half an hour gives up the chair, even if a coat is left on it.\n\n"
        "6. Quiet. The library cat may speak. Everyone else whispers. Children under five may laugh aloud, since "
        "they cannot help it, and so may anybody who is reading a book from the yellow shelf beside the stairs.\n\n"
        "Summarise these terms for a new reader in five short points."
    ),
    # A travel diary: a ferry that fills up
    (
        "Tuesday, on the quay at Sandvig. I had imagined that one simply walks onto a ferry. One does not. One is "
        "given a card with a number, a bench with a view of the number board, and a great deal of time. My card "
        "says 61. The board says 38. A gull is sitting on the board and appears to be in charge.\n\n"
        "The ferry to the islands has no timetable in the winter. It leaves when it is full, or on the hour, "
        "whichever comes first. A woman with a crate of leeks explained this to me as if it were the most natural "
        "thing in the world. In the summer, she said, it is always full, and so it never rests; it goes back and "
        "forth like a shuttle in a loom. In the winter the skipper sits in his cabin and solves crosswords until "
        "the clock strikes. 'And if you are the only passenger?' I asked. 'Then you have a very large boat,' she "
        "said.\n\n"
        "Three o'clock. We are moving. There are nineteen of us, two vans, the leeks and a piano wrapped in "
        "blankets. At the first island seven people got off and ten others came on board, without the rest of us "
        "having to move at all. I had expected that everybody would be brought to the end and that the boat would "
        "return for a new load, but why should it? A seat is free, somebody takes it. The piano left us on the "
        "second island, where a whole choir was waiting on the pier and sang to it.\n\n"
        "Half past five. It is dark. I am the last passenger, for I am going all the way to the lighthouse. The "
        "skipper called me up into the cabin, gave me a mug of tea and asked me for a river in seven letters. I "
        "did not know one, and said so, and was given a biscuit all the same. We sat and looked at the beam of "
        "the lighthouse, which came round to us every ten seconds, whether anybody was there to see it or not.\n\n"
        "I shall stay until Friday. They say that there will be snow.\n\n"
        "In one sentence, what surprised the traveller about the ferry?"
    ),
)
